"""Spend a point of experience to cast and enchant with more mana; each new floor gives one."""

name = "Level Up Intelligence"
gain = {"intelligence": "2"}
floors = [3, 4, 5, 6, 7, 8]


def task_is_done(intelligence):
    return intelligence >= 2


def task_reward(intelligence_diff):
    return 1.0 * intelligence_diff
