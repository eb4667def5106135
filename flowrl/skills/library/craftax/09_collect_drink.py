"""Drink water."""

name = "Collect Drink"
requirements = {}
consumption = {}
gain = {"drank": "1"}
floors = [0, 2, 3, 5, 7]


def task_is_done(achievements):
    return achievements[Achievement.COLLECT_DRINK.value] > 0


def task_reward(achievements_diff, closest_blocks, closest_blocks_prev):
    water_before = jnp.sum(jnp.abs(closest_blocks_prev[BlockType.WATER.value, :, 0]))
    water_now = jnp.sum(jnp.abs(closest_blocks[BlockType.WATER.value, :, 0]))
    closer = jnp.minimum(water_before, 8) - jnp.minimum(water_now, 8)
    return 1.0 * achievements_diff[Achievement.COLLECT_DRINK.value] + 0.05 * closer
