"""Craft torches beside a table; wood and coal make four."""

name = "Make Torch"
requirements = {"near_table": "1"}
consumption = {"wood": "ceil(n/4)", "coal": "ceil(n/4)"}
gain = {"torches": "n"}


def task_is_done(inventory, n):
    return inventory.torches >= n


def task_reward(inventory, inventory_diff, closest_blocks, closest_blocks_prev, n):
    before = inventory.torches - inventory_diff.torches
    made = jnp.minimum(inventory.torches, n) - jnp.minimum(before, n)
    table_before = jnp.sum(jnp.abs(closest_blocks_prev[BlockType.CRAFTING_TABLE.value, :, 0]))
    table_now = jnp.sum(jnp.abs(closest_blocks[BlockType.CRAFTING_TABLE.value, :, 0]))
    to_table = jnp.minimum(table_before, 8) - jnp.minimum(table_now, 8)
    return made + 0.05 * to_table
