"""Eat three pies at the table."""

name = "Feast"
requirements = {"pie": "3"}
consumption = {"pie": "3"}
gain = {"fed": "1"}


def task_is_done(fed):
    return fed


def task_reward(fed_diff, cell, cell_prev):
    nearer = jnp.abs(cell_prev - Cell.TABLE.value) - jnp.abs(cell - Cell.TABLE.value)
    return fed_diff + 0.1 * nearer
