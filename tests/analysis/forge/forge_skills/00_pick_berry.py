"""Pick berries from the bush."""

name = "Pick Berry"
requirements = {}
consumption = {}
gain = {"berry": "n"}


def task_is_done(inventory, n):
    return inventory.berry >= n


def task_reward(inventory_diff, cell, cell_prev):
    nearer = jnp.abs(cell_prev - Cell.BUSH.value) - jnp.abs(cell - Cell.BUSH.value)
    return inventory_diff.berry + 0.1 * nearer
