"""Pick a sapling out of the grass; one try in ten finds one."""

name = "Collect Sapling"
requirements = {}
consumption = {}
gain = {"sapling": "n"}
floors = [0]


def task_is_done(inventory, n):
    return inventory.sapling >= n


def task_reward(inventory, inventory_diff, n):
    before = inventory.sapling - inventory_diff.sapling
    return jnp.minimum(inventory.sapling, n) - jnp.minimum(before, n)
