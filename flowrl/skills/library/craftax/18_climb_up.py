"""Climb the ladder up: from floor n to the one above it."""

name = "Climb Up"
requirements = {"on_floor": "n"}
gain = {"on_floor": "n - 1"}


def task_is_done(player_level, n):
    return player_level == n - 1


def task_reward(player_level_diff, closest_items, closest_items_prev, damage_dealt):
    ladder_before = jnp.sum(jnp.abs(closest_items_prev[ItemType.LADDER_UP.value, :, 0]))
    ladder_now = jnp.sum(jnp.abs(closest_items[ItemType.LADDER_UP.value, :, 0]))
    closer = jnp.minimum(ladder_before, 8) - jnp.minimum(ladder_now, 8)
    same_floor = player_level_diff == 0
    return -1.0 * player_level_diff + 0.05 * same_floor * closer + 0.1 * damage_dealt
