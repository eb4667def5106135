"""Walk to the goal in the other room."""

name = "Reach Goal"
requirements = {"other_room": 1}
gain = {"goal": 1}


def task_is_done(at_goal):
    return at_goal == 1


def task_reward(goal_distance_diff):
    return -0.1 * goal_distance_diff
