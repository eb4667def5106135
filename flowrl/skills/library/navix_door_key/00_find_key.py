"""Walk to the key and face it."""

name = "Find Key"
gain = {"near_key": 1}
ephemeral = ["near_key"]


def task_is_done(key_ahead):
    return key_ahead == 1


def task_reward(key_distance_diff):
    return -0.1 * key_distance_diff
