"""Craft pieces of diamond armour, of which four can be worn."""

name = "Make Diamond Armour"
requirements = {"near_table": "1"}
consumption = {"diamond": "3*n"}
gain = {"diamond_armour": "n", "armour": "2*n"}


def task_is_done(inventory, n):
    return jnp.sum(inventory.armour >= 2) >= n


def task_reward(inventory, inventory_diff, closest_blocks, closest_blocks_prev, n):
    before = jnp.sum(inventory.armour - inventory_diff.armour >= 2)
    worn = jnp.sum(inventory.armour >= 2)
    made = jnp.minimum(worn, n) - jnp.minimum(before, n)
    table_before = jnp.sum(jnp.abs(closest_blocks_prev[BlockType.CRAFTING_TABLE.value, :, 0]))
    table_now = jnp.sum(jnp.abs(closest_blocks[BlockType.CRAFTING_TABLE.value, :, 0]))
    to_table = jnp.minimum(table_before, 8) - jnp.minimum(table_now, 8)
    return made + 0.05 * to_table
