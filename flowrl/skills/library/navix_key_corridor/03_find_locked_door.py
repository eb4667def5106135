"""Walk to the locked door and face it."""

name = "Find Locked Door"
requirements = {"key": 1}
gain = {"near_door": 1}
ephemeral = ["near_door"]


def task_is_done(lock_ahead):
    return lock_ahead == 1


def task_reward(lock_distance_diff, locked_doors):
    return -0.1 * lock_distance_diff * (locked_doors > 0)
