"""Put a stone back into the world."""

name = "Place Stone"
consumption = {"stone": "1"}
gain = {"placed_stone": "1"}


def task_is_done(achievements):
    return achievements[Achievement.PLACE_STONE.value] > 0


def task_reward(achievements_diff):
    return 1.0 * achievements_diff[Achievement.PLACE_STONE.value]
