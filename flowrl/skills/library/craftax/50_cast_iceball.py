"""Cast an iceball; it takes two mana, which come back with time."""

name = "Cast Iceball"
requirements = {"iceball": "1"}
gain = {"cast_iceball": "1"}


def task_is_done(achievements):
    return achievements[Achievement.CAST_ICEBALL.value] > 0


def task_reward(achievements_diff):
    return 1.0 * achievements_diff[Achievement.CAST_ICEBALL.value]
