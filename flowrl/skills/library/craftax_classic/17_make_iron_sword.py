"""Craft an iron sword beside a table and a furnace."""

name = "Make Iron Sword"
requirements = {
    "wood": "n",
    "stone": "n",
    "coal": "n",
    "iron": "n",
    "near_table": "1",
    "near_furnace": "1",
}
consumption = {"wood": "n", "stone": "n", "coal": "n", "iron": "n"}
gain = {"iron_sword": "n"}
training = {"total_timesteps": 3_000_000}


def task_is_done(inventory, n):
    return inventory.iron_sword >= n


def task_reward(inventory, inventory_diff, closest_blocks, closest_blocks_prev, n):
    before = inventory.iron_sword - inventory_diff.iron_sword
    made = jnp.minimum(inventory.iron_sword, n) - jnp.minimum(before, n)
    table_before = jnp.sum(jnp.abs(closest_blocks_prev[BlockType.CRAFTING_TABLE.value, :, 0]))
    table_now = jnp.sum(jnp.abs(closest_blocks[BlockType.CRAFTING_TABLE.value, :, 0]))
    to_table = jnp.minimum(table_before, 8) - jnp.minimum(table_now, 8)
    furnace_before = jnp.sum(jnp.abs(closest_blocks_prev[BlockType.FURNACE.value, :, 0]))
    furnace_now = jnp.sum(jnp.abs(closest_blocks[BlockType.FURNACE.value, :, 0]))
    to_furnace = jnp.minimum(furnace_before, 8) - jnp.minimum(furnace_now, 8)
    return made + 0.05 * to_table + 0.05 * to_furnace
