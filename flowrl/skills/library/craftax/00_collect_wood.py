"""Harvest wood from trees."""

name = "Collect Wood"
requirements = {}
consumption = {}
gain = {"wood": "n"}
floors = [0]
max_count = 6  # some meadows are closed by rock and water, and a felled tree is gone


def task_is_done(inventory, n):
    return inventory.wood >= n


def task_reward(inventory, inventory_diff, closest_blocks, closest_blocks_prev, n):
    before = inventory.wood - inventory_diff.wood
    gathered = jnp.minimum(inventory.wood, n) - jnp.minimum(before, n)
    distance_before = jnp.sum(jnp.abs(closest_blocks_prev[BlockType.TREE.value, :, 0]))
    distance_now = jnp.sum(jnp.abs(closest_blocks[BlockType.TREE.value, :, 0]))
    closer = jnp.minimum(distance_before, 8) - jnp.minimum(distance_now, 8)
    return gathered + 0.05 * closer
