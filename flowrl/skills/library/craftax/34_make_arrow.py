"""Craft arrows beside a table; wood and stone make two."""

name = "Make Arrow"
requirements = {"near_table": "1"}
consumption = {"wood": "ceil(n/2)", "stone": "ceil(n/2)"}
gain = {"arrows": "n"}


def task_is_done(inventory, n):
    return inventory.arrows >= n


def task_reward(inventory, inventory_diff, closest_blocks, closest_blocks_prev, n):
    before = inventory.arrows - inventory_diff.arrows
    made = jnp.minimum(inventory.arrows, n) - jnp.minimum(before, n)
    table_before = jnp.sum(jnp.abs(closest_blocks_prev[BlockType.CRAFTING_TABLE.value, :, 0]))
    table_now = jnp.sum(jnp.abs(closest_blocks[BlockType.CRAFTING_TABLE.value, :, 0]))
    to_table = jnp.minimum(table_before, 8) - jnp.minimum(table_now, 8)
    return made + 0.05 * to_table
