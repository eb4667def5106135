"""Break stalagmites in the mines: they are stone."""

name = "Mine Stalagmite"
requirements = {"pickaxe": "1"}
gain = {"stone": "n"}
floors = [2, 5]


def task_is_done(inventory, n):
    return inventory.stone >= n


def task_reward(inventory, inventory_diff, closest_blocks, closest_blocks_prev, damage_dealt, n):
    before = inventory.stone - inventory_diff.stone
    gathered = jnp.minimum(inventory.stone, n) - jnp.minimum(before, n)
    distance_before = jnp.sum(jnp.abs(closest_blocks_prev[BlockType.STALAGMITE.value, :, 0]))
    distance_now = jnp.sum(jnp.abs(closest_blocks[BlockType.STALAGMITE.value, :, 0]))
    closer = jnp.minimum(distance_before, 8) - jnp.minimum(distance_now, 8)
    return gathered + 0.05 * closer + 0.1 * damage_dealt
