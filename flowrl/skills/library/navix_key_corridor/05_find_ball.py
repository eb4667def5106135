"""Walk into the room behind the door that was locked, and face the ball."""

name = "Find Ball"
requirements = {"unlocked": 1}
gain = {"near_ball": 1}
ephemeral = ["near_ball"]


def task_is_done(goal_ahead):
    return goal_ahead == 1


def task_reward(goal_distance_diff):
    return -0.1 * goal_distance_diff
