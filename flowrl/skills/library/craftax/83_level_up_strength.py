"""Spend a point of experience to strike harder and bear more; each new floor gives one."""

name = "Level Up Strength"
gain = {"strength": "2"}
floors = [2, 3, 4, 5, 6, 7, 8]


def task_is_done(strength):
    return strength >= 2


def task_reward(strength_diff):
    return 1.0 * strength_diff
