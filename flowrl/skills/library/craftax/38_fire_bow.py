"""Shoot an arrow."""

name = "Fire Bow"
requirements = {"bow": "1"}
consumption = {"arrows": "1"}
gain = {"fired_bow": "1"}


def task_is_done(achievements):
    return achievements[Achievement.FIRE_BOW.value] > 0


def task_reward(achievements_diff):
    return 1.0 * achievements_diff[Achievement.FIRE_BOW.value]
