"""Open the locked door in front with the key."""

name = "Open Door"
requirements = {"key": 1, "near_door": 1}
gain = {"door_open": 1}


def task_is_done(open_doors):
    return open_doors >= 1


def task_reward(open_doors_diff):
    return 1.0 * open_doors_diff
