"""Cut grapes with a knife."""

name = "Cut Grape"
requirements = {"knife": "1"}
consumption = {}
gain = {"grape": "n"}


def task_is_done(inventory, n):
    return inventory.grape >= n


def task_reward(inventory_diff, cell, cell_prev):
    nearer = jnp.abs(cell_prev - Cell.VINE.value) - jnp.abs(cell - Cell.VINE.value)
    return inventory_diff.grape + 0.1 * nearer
