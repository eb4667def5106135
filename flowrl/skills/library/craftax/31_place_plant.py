"""Plant a sapling in grass."""

name = "Place Plant"
consumption = {"sapling": "1"}
gain = {"planted": "1"}
floors = [0]


def task_is_done(achievements):
    return achievements[Achievement.PLACE_PLANT.value] > 0


def task_reward(achievements_diff, closest_blocks, closest_blocks_prev):
    grass_before = jnp.sum(jnp.abs(closest_blocks_prev[BlockType.GRASS.value, :, 0]))
    grass_now = jnp.sum(jnp.abs(closest_blocks[BlockType.GRASS.value, :, 0]))
    closer = jnp.minimum(grass_before, 8) - jnp.minimum(grass_now, 8)
    return 1.0 * achievements_diff[Achievement.PLACE_PLANT.value] + 0.02 * closer
