"""Spend a point of experience to eat, drink and sleep less often; each new floor gives one."""

name = "Level Up Dexterity"
gain = {"dexterity": "2"}
floors = [1, 2, 3, 4, 5, 6, 7, 8]


def task_is_done(dexterity):
    return dexterity >= 2


def task_reward(dexterity_diff):
    return 1.0 * dexterity_diff
