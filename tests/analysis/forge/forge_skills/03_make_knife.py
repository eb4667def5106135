"""Forge a knife of two pieces of ore."""

name = "Make Knife"
requirements = {"ore": "2"}
consumption = {"ore": "2"}
gain = {"knife": "1"}


def task_is_done(inventory):
    return inventory.knife >= 1


def task_reward(inventory_diff, cell, cell_prev):
    nearer = jnp.abs(cell_prev - Cell.FORGE.value) - jnp.abs(cell - Cell.FORGE.value)
    return inventory_diff.knife + 0.1 * nearer
