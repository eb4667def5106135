"""Mine a diamond with an iron pickaxe."""

name = "Collect Diamond"
requirements = {"pickaxe": "3"}
gain = {"diamond": "n"}
floors = [2, 5, 7]
training = {"total_timesteps": 3_000_000}


def task_is_done(inventory, n):
    return inventory.diamond >= n


def task_reward(inventory, inventory_diff, closest_blocks, closest_blocks_prev, damage_dealt, n):
    before = inventory.diamond - inventory_diff.diamond
    gathered = jnp.minimum(inventory.diamond, n) - jnp.minimum(before, n)
    distance_before = jnp.sum(jnp.abs(closest_blocks_prev[BlockType.DIAMOND.value, :, 0]))
    distance_now = jnp.sum(jnp.abs(closest_blocks[BlockType.DIAMOND.value, :, 0]))
    closer = jnp.minimum(distance_before, 8) - jnp.minimum(distance_now, 8)
    return gathered + 0.05 * closer + 0.1 * damage_dealt
