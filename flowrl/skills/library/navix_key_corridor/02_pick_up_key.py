"""Pick up the key that lies in front."""

name = "Pick Up Key"
requirements = {"near_key": 1}
gain = {"key": 1}


def task_is_done(has_key):
    return has_key == 1


def task_reward(has_key_diff):
    return 1.0 * has_key_diff
