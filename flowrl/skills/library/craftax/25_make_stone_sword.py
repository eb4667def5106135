"""Craft a stone sword beside a table."""

name = "Make Stone Sword"
requirements = {"near_table": "1"}
consumption = {"wood": "1", "stone": "1"}
gain = {"sword": "2"}


def task_is_done(inventory):
    return inventory.sword >= 2


def task_reward(inventory, inventory_diff, closest_blocks, closest_blocks_prev):
    before = inventory.sword - inventory_diff.sword
    made = jnp.minimum(inventory.sword, 2) - jnp.minimum(before, 2)
    table_before = jnp.sum(jnp.abs(closest_blocks_prev[BlockType.CRAFTING_TABLE.value, :, 0]))
    table_now = jnp.sum(jnp.abs(closest_blocks[BlockType.CRAFTING_TABLE.value, :, 0]))
    to_table = jnp.minimum(table_before, 8) - jnp.minimum(table_now, 8)
    return made + 0.05 * to_table
