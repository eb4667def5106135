"""Craft a wood sword beside a table."""

name = "Make Wood Sword"
requirements = {"wood": "n", "near_table": "1"}
consumption = {"wood": "n"}
gain = {"wood_sword": "n"}


def task_is_done(inventory, n):
    return inventory.wood_sword >= n


def task_reward(inventory, inventory_diff, closest_blocks, closest_blocks_prev, n):
    before = inventory.wood_sword - inventory_diff.wood_sword
    made = jnp.minimum(inventory.wood_sword, n) - jnp.minimum(before, n)
    table_before = jnp.sum(jnp.abs(closest_blocks_prev[BlockType.CRAFTING_TABLE.value, :, 0]))
    table_now = jnp.sum(jnp.abs(closest_blocks[BlockType.CRAFTING_TABLE.value, :, 0]))
    to_table = jnp.minimum(table_before, 8) - jnp.minimum(table_now, 8)
    return made + 0.05 * to_table
