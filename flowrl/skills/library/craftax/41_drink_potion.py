"""Drink a potion of any colour; nobody knows what it does."""

name = "Drink Potion"
consumption = {"potions": "1"}
gain = {"drank_potion": "1"}


def task_is_done(achievements):
    return achievements[Achievement.DRINK_POTION.value] > 0


def task_reward(achievements_diff):
    return 1.0 * achievements_diff[Achievement.DRINK_POTION.value]
