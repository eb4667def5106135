"""Walk to the bush and pick berries."""

name = "Pick Berry"
gain = {"berry": "n"}


def task_is_done(inventory, n):
    return inventory.berry >= n


def task_reward(inventory_diff, cell_diff):
    return inventory_diff.berry + 0.1 * cell_diff
