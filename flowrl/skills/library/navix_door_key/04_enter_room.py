"""Walk through the open door into the other room."""

name = "Enter Room"
requirements = {"door_open": 1}
gain = {"other_room": 1}


def task_is_done(past_door):
    return past_door >= 1


def task_reward(past_door_diff, goal_distance_diff):
    return 0.5 * past_door_diff - 0.05 * goal_distance_diff
