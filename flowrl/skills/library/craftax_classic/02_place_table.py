"""Place a crafting table; two pieces of wood, and stay beside it."""

name = "Place Table"
requirements = {"wood": "2"}
consumption = {"wood": "2"}
gain = {"near_table": "1"}
ephemeral = ["near_table"]


def task_is_done(closest_blocks):
    table = closest_blocks[BlockType.CRAFTING_TABLE.value]
    return jnp.any(jnp.max(jnp.abs(table), axis=0) <= 1)


def task_reward(closest_blocks, closest_blocks_prev):
    table = closest_blocks[BlockType.CRAFTING_TABLE.value]
    table_before = closest_blocks_prev[BlockType.CRAFTING_TABLE.value]
    near = jnp.any(jnp.max(jnp.abs(table), axis=0) <= 1)
    near_before = jnp.any(jnp.max(jnp.abs(table_before), axis=0) <= 1)
    return 1.0 * near - 1.0 * near_before
