"""Mine a sapphire with a diamond pickaxe."""

name = "Collect Sapphire"
requirements = {"pickaxe": "4"}
gain = {"sapphire": "n"}
floors = [2, 5, 7]


def task_is_done(inventory, n):
    return inventory.sapphire >= n


def task_reward(inventory, inventory_diff, closest_blocks, closest_blocks_prev, damage_dealt, n):
    before = inventory.sapphire - inventory_diff.sapphire
    gathered = jnp.minimum(inventory.sapphire, n) - jnp.minimum(before, n)
    distance_before = jnp.sum(jnp.abs(closest_blocks_prev[BlockType.SAPPHIRE.value, :, 0]))
    distance_now = jnp.sum(jnp.abs(closest_blocks[BlockType.SAPPHIRE.value, :, 0]))
    closer = jnp.minimum(distance_before, 8) - jnp.minimum(distance_now, 8)
    return gathered + 0.05 * closer + 0.1 * damage_dealt
