"""Craft a stone pickaxe beside a table."""

name = "Make Stone Pickaxe"
requirements = {"wood": "n", "stone": "n", "near_table": "1"}
consumption = {"wood": "n", "stone": "n"}
gain = {"stone_pickaxe": "n"}


def task_is_done(inventory, n):
    return inventory.stone_pickaxe >= n


def task_reward(inventory, inventory_diff, closest_blocks, closest_blocks_prev, n):
    before = inventory.stone_pickaxe - inventory_diff.stone_pickaxe
    made = jnp.minimum(inventory.stone_pickaxe, n) - jnp.minimum(before, n)
    table_before = jnp.sum(jnp.abs(closest_blocks_prev[BlockType.CRAFTING_TABLE.value, :, 0]))
    table_now = jnp.sum(jnp.abs(closest_blocks[BlockType.CRAFTING_TABLE.value, :, 0]))
    to_table = jnp.minimum(table_before, 8) - jnp.minimum(table_now, 8)
    return made + 0.05 * to_table
