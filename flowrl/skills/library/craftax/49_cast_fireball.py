"""Cast a fireball; it takes two mana, which come back with time."""

name = "Cast Fireball"
requirements = {"fireball": "1"}
gain = {"cast_fireball": "1"}


def task_is_done(achievements):
    return achievements[Achievement.CAST_FIREBALL.value] > 0


def task_reward(achievements_diff):
    return 1.0 * achievements_diff[Achievement.CAST_FIREBALL.value]
