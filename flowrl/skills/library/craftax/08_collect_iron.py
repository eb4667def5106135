"""Mine iron with a stone pickaxe."""

name = "Collect Iron"
requirements = {"pickaxe": "2"}
consumption = {}
gain = {"iron": "n"}
floors = [0, 2, 5]
training = {"total_timesteps": 3_000_000}


def task_is_done(inventory, n):
    return inventory.iron >= n


def task_reward(inventory, inventory_diff, closest_blocks, closest_blocks_prev, n):
    before = inventory.iron - inventory_diff.iron
    gathered = jnp.minimum(inventory.iron, n) - jnp.minimum(before, n)
    distance_before = jnp.sum(jnp.abs(closest_blocks_prev[BlockType.IRON.value, :, 0]))
    distance_now = jnp.sum(jnp.abs(closest_blocks[BlockType.IRON.value, :, 0]))
    closer = jnp.minimum(distance_before, 8) - jnp.minimum(distance_now, 8)
    stone_before = jnp.sum(jnp.abs(closest_blocks_prev[BlockType.STONE.value, :, 0]))
    stone_now = jnp.sum(jnp.abs(closest_blocks[BlockType.STONE.value, :, 0]))
    towards_stone = jnp.minimum(stone_before, 8) - jnp.minimum(stone_now, 8)
    return gathered + 0.05 * closer + 0.02 * towards_stone
