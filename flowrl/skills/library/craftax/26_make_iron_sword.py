"""Craft an iron sword beside a table and a furnace."""

name = "Make Iron Sword"
requirements = {"near_table": "1", "near_furnace": "1"}
consumption = {"wood": "1", "stone": "1", "coal": "1", "iron": "1"}
gain = {"sword": "3"}
training = {"total_timesteps": 3_000_000}


def task_is_done(inventory):
    return inventory.sword >= 3


def task_reward(inventory, inventory_diff, closest_blocks, closest_blocks_prev):
    before = inventory.sword - inventory_diff.sword
    made = jnp.minimum(inventory.sword, 3) - jnp.minimum(before, 3)
    table_before = jnp.sum(jnp.abs(closest_blocks_prev[BlockType.CRAFTING_TABLE.value, :, 0]))
    table_now = jnp.sum(jnp.abs(closest_blocks[BlockType.CRAFTING_TABLE.value, :, 0]))
    to_table = jnp.minimum(table_before, 8) - jnp.minimum(table_now, 8)
    furnace_before = jnp.sum(jnp.abs(closest_blocks_prev[BlockType.FURNACE.value, :, 0]))
    furnace_now = jnp.sum(jnp.abs(closest_blocks[BlockType.FURNACE.value, :, 0]))
    to_furnace = jnp.minimum(furnace_before, 8) - jnp.minimum(furnace_now, 8)
    return made + 0.05 * to_table + 0.05 * to_furnace
