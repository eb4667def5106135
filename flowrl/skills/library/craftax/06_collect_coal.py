"""Mine coal with a pickaxe."""

name = "Collect Coal"
requirements = {"pickaxe": "1"}
consumption = {}
gain = {"coal": "n"}
floors = [0, 2, 5, 6]


def task_is_done(inventory, n):
    return inventory.coal >= n


def task_reward(inventory, inventory_diff, closest_blocks, closest_blocks_prev, n):
    before = inventory.coal - inventory_diff.coal
    gathered = jnp.minimum(inventory.coal, n) - jnp.minimum(before, n)
    distance_before = jnp.sum(jnp.abs(closest_blocks_prev[BlockType.COAL.value, :, 0]))
    distance_now = jnp.sum(jnp.abs(closest_blocks[BlockType.COAL.value, :, 0]))
    closer = jnp.minimum(distance_before, 8) - jnp.minimum(distance_now, 8)
    stone_before = jnp.sum(jnp.abs(closest_blocks_prev[BlockType.STONE.value, :, 0]))
    stone_now = jnp.sum(jnp.abs(closest_blocks[BlockType.STONE.value, :, 0]))
    towards_stone = jnp.minimum(stone_before, 8) - jnp.minimum(stone_now, 8)
    return gathered + 0.05 * closer + 0.02 * towards_stone
