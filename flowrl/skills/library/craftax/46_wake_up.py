"""Sleep when tired, and wake up rested."""

name = "Wake Up"
gain = {"woke_up": "1"}


def task_is_done(achievements):
    return achievements[Achievement.WAKE_UP.value] > 0


def task_reward(achievements_diff, is_sleeping, was_sleeping, player_intrinsics_diff):
    asleep = 1.0 * is_sleeping - 1.0 * was_sleeping
    woke = 1.0 * achievements_diff[Achievement.WAKE_UP.value]
    return woke + 0.1 * asleep + 0.05 * player_intrinsics_diff[0]
