"""Carry berries to the oven and bake pies."""

name = "Bake Pie"
requirements = {"berry": "n"}
consumption = {"berry": "n"}
gain = {"pie": "n"}


def task_is_done(inventory, n):
    return inventory.pie >= n


def task_reward(inventory_diff, cell, cell_diff):
    return inventory_diff.pie - 0.1 * cell_diff - 0.01 * (cell == Cell.BUSH.value)
