"""Bake pies of berries."""

name = "Bake Pie"
requirements = {"berry": "n"}
consumption = {"berry": "n"}
gain = {"pie": "n"}


def task_is_done(inventory, n):
    return inventory.pie >= n


def task_reward(inventory_diff, cell, cell_prev):
    nearer = jnp.abs(cell_prev - Cell.OVEN.value) - jnp.abs(cell - Cell.OVEN.value)
    return inventory_diff.pie + 0.1 * nearer
