"""Plant a sapling in grass."""

name = "Place Plant"
requirements = {"sapling": "1"}
consumption = {"sapling": "1"}
gain = {"planted": "1"}


def task_is_done(achievements):
    return achievements[Achievement.PLACE_PLANT.value] > 0


def task_reward(inventory_diff, facing_block, closest_blocks, closest_blocks_prev):
    planted = jnp.logical_and(inventory_diff.sapling < 0, facing_block == BlockType.PLANT.value)
    grass_before = jnp.sum(jnp.abs(closest_blocks_prev[BlockType.GRASS.value, :, 0]))
    grass_now = jnp.sum(jnp.abs(closest_blocks[BlockType.GRASS.value, :, 0]))
    closer = jnp.minimum(grass_before, 8) - jnp.minimum(grass_now, 8)
    return 1.0 * planted + 0.02 * closer
