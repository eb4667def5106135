"""Dig ore out of the rock."""

name = "Dig Ore"
requirements = {}
consumption = {}
gain = {"ore": "n"}


def task_is_done(inventory, n):
    return inventory.ore >= n


def task_reward(inventory_diff, cell, cell_prev):
    nearer = jnp.abs(cell_prev - Cell.ROCK.value) - jnp.abs(cell - Cell.ROCK.value)
    return inventory_diff.ore + 0.1 * nearer
