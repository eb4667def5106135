"""Craft a wood pickaxe beside a table."""

name = "Make Wood Pickaxe"
requirements = {"wood": "n", "near_table": "1"}
consumption = {"wood": "n"}
gain = {"wood_pickaxe": "n"}


def task_is_done(inventory, n):
    return inventory.wood_pickaxe >= n


def task_reward(inventory, inventory_diff, closest_blocks, closest_blocks_prev, n):
    before = inventory.wood_pickaxe - inventory_diff.wood_pickaxe
    made = jnp.minimum(inventory.wood_pickaxe, n) - jnp.minimum(before, n)
    table_before = jnp.sum(jnp.abs(closest_blocks_prev[BlockType.CRAFTING_TABLE.value, :, 0]))
    table_now = jnp.sum(jnp.abs(closest_blocks[BlockType.CRAFTING_TABLE.value, :, 0]))
    to_table = jnp.minimum(table_before, 8) - jnp.minimum(table_now, 8)
    return made + 0.05 * to_table
