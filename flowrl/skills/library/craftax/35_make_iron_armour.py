"""Craft pieces of iron armour, of which four can be worn."""

name = "Make Iron Armour"
requirements = {"near_table": "1", "near_furnace": "1"}
consumption = {"iron": "3*n", "coal": "3*n"}
gain = {"armour": "n"}


def task_is_done(inventory, n):
    return jnp.sum(inventory.armour >= 1) >= n


def task_reward(inventory, inventory_diff, closest_blocks, closest_blocks_prev, n):
    before = jnp.sum(inventory.armour - inventory_diff.armour >= 1)
    worn = jnp.sum(inventory.armour >= 1)
    made = jnp.minimum(worn, n) - jnp.minimum(before, n)
    table_before = jnp.sum(jnp.abs(closest_blocks_prev[BlockType.CRAFTING_TABLE.value, :, 0]))
    table_now = jnp.sum(jnp.abs(closest_blocks[BlockType.CRAFTING_TABLE.value, :, 0]))
    to_table = jnp.minimum(table_before, 8) - jnp.minimum(table_now, 8)
    furnace_before = jnp.sum(jnp.abs(closest_blocks_prev[BlockType.FURNACE.value, :, 0]))
    furnace_now = jnp.sum(jnp.abs(closest_blocks[BlockType.FURNACE.value, :, 0]))
    to_furnace = jnp.minimum(furnace_before, 8) - jnp.minimum(furnace_now, 8)
    return made + 0.05 * to_table + 0.05 * to_furnace
