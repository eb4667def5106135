"""Put a torch on the ground; it lights the cells around it."""

name = "Place Torch"
consumption = {"torches": "1"}
gain = {"placed_torch": "1"}


def task_is_done(achievements):
    return achievements[Achievement.PLACE_TORCH.value] > 0


def task_reward(achievements_diff):
    return 1.0 * achievements_diff[Achievement.PLACE_TORCH.value]
