"""Open the locked door in front with the key."""

name = "Unlock Door"
requirements = {"key": 1, "near_door": 1}
gain = {"unlocked": 1}


def task_is_done(locked_doors):
    return locked_doors == 0


def task_reward(locked_doors_diff):
    return -1.0 * locked_doors_diff
