"""Place a furnace; one stone, and stay beside it."""

name = "Place Furnace"
requirements = {"stone": "1"}
consumption = {"stone": "1"}
gain = {"near_furnace": "1"}
ephemeral = ["near_furnace"]


def task_is_done(closest_blocks):
    furnace = closest_blocks[BlockType.FURNACE.value]
    return jnp.any(jnp.max(jnp.abs(furnace), axis=0) <= 1)


def task_reward(closest_blocks, closest_blocks_prev, damage_dealt):
    furnace = closest_blocks[BlockType.FURNACE.value]
    furnace_before = closest_blocks_prev[BlockType.FURNACE.value]
    near = jnp.any(jnp.max(jnp.abs(furnace), axis=0) <= 1)
    near_before = jnp.any(jnp.max(jnp.abs(furnace_before), axis=0) <= 1)
    # A table in reach is worth keeping: iron is worked beside both.
    table = jnp.sum(jnp.abs(closest_blocks[BlockType.CRAFTING_TABLE.value, :, 0]))
    table_before = jnp.sum(jnp.abs(closest_blocks_prev[BlockType.CRAFTING_TABLE.value, :, 0]))
    to_table = jnp.minimum(table_before, 8) - jnp.minimum(table, 8)
    return 1.0 * near - 1.0 * near_before + 0.05 * to_table + 0.1 * damage_dealt
