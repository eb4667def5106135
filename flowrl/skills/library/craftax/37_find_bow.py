"""Open a chest of the dungeon; the first holds a bow."""

name = "Find Bow"
gain = {"bow": "1"}
floors = [1]


def task_is_done(inventory):
    return inventory.bow >= 1


def task_reward(inventory, inventory_diff, closest_blocks, closest_blocks_prev, damage_dealt):
    before = inventory.bow - inventory_diff.bow
    found = jnp.minimum(inventory.bow, 1) - jnp.minimum(before, 1)
    chest_before = jnp.sum(jnp.abs(closest_blocks_prev[BlockType.CHEST.value, :, 0]))
    chest_now = jnp.sum(jnp.abs(closest_blocks[BlockType.CHEST.value, :, 0]))
    closer = jnp.minimum(chest_before, 8) - jnp.minimum(chest_now, 8)
    return found + 0.05 * closer + 0.1 * damage_dealt
