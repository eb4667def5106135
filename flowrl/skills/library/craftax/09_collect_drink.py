"""Drink of water or of a fountain."""

name = "Collect Drink"
gain = {"drank": "1"}
floors = [0, 1, 2, 3, 4, 5, 7]


def task_is_done(achievements):
    return achievements[Achievement.COLLECT_DRINK.value] > 0


def task_reward(achievements_diff, closest_blocks, closest_blocks_prev):
    water = jnp.array([BlockType.WATER.value, BlockType.FOUNTAIN.value])
    before = jnp.sum(jnp.abs(closest_blocks_prev[water, :, 0]), axis=1).min()
    now = jnp.sum(jnp.abs(closest_blocks[water, :, 0]), axis=1).min()
    closer = jnp.minimum(before, 8) - jnp.minimum(now, 8)
    return 1.0 * achievements_diff[Achievement.COLLECT_DRINK.value] + 0.05 * closer
