"""Go down the ladder of the mines, once it is open."""

name = "Enter Sewers"
requirements = {"on_floor": "2", "pickaxe": "1", "floor_cleared_2": "1"}
gain = {"on_floor": "3"}


def task_is_done(player_level):
    return player_level == 3


def task_reward(player_level_diff, closest_items, closest_items_prev, damage_dealt):
    ladder_before = jnp.sum(jnp.abs(closest_items_prev[ItemType.LADDER_DOWN.value, :, 0]))
    ladder_now = jnp.sum(jnp.abs(closest_items[ItemType.LADDER_DOWN.value, :, 0]))
    closer = jnp.minimum(ladder_before, 8) - jnp.minimum(ladder_now, 8)
    same_floor = player_level_diff == 0
    return 1.0 * player_level_diff + 0.05 * same_floor * closer + 0.1 * damage_dealt
