"""Craft a diamond sword beside a table."""

name = "Make Diamond Sword"
requirements = {"near_table": "1"}
consumption = {"wood": "1", "diamond": "2"}
gain = {"sword": "4"}


def task_is_done(inventory):
    return inventory.sword >= 4


def task_reward(inventory, inventory_diff, closest_blocks, closest_blocks_prev):
    before = inventory.sword - inventory_diff.sword
    made = jnp.minimum(inventory.sword, 4) - jnp.minimum(before, 4)
    table_before = jnp.sum(jnp.abs(closest_blocks_prev[BlockType.CRAFTING_TABLE.value, :, 0]))
    table_now = jnp.sum(jnp.abs(closest_blocks[BlockType.CRAFTING_TABLE.value, :, 0]))
    to_table = jnp.minimum(table_before, 8) - jnp.minimum(table_now, 8)
    return made + 0.05 * to_table
