"""Go down the ladder of the first floor, which is open from the start, often behind rock."""

name = "Enter Dungeon"
requirements = {"on_floor": "0", "pickaxe": "1", "sword": "1"}
gain = {"on_floor": "1"}
max_steps = 600  # an ideal player finds the ladder within 300 in four of five worlds


def task_is_done(player_level):
    return player_level == 1


def task_reward(player_level_diff, closest_items, closest_items_prev, damage_dealt):
    ladder_before = jnp.sum(jnp.abs(closest_items_prev[ItemType.LADDER_DOWN.value, :, 0]))
    ladder_now = jnp.sum(jnp.abs(closest_items[ItemType.LADDER_DOWN.value, :, 0]))
    closer = jnp.minimum(ladder_before, 8) - jnp.minimum(ladder_now, 8)
    same_floor = player_level_diff == 0
    return 1.0 * player_level_diff + 0.05 * same_floor * closer + 0.1 * damage_dealt
