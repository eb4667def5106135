"""Open chests until one holds a potion; every other one does."""

name = "Find Potion"
gain = {"potions": "1"}
floors = [1, 3, 4]


def task_is_done(inventory):
    return jnp.sum(inventory.potions) >= 1


def task_reward(inventory, inventory_diff, closest_blocks, closest_blocks_prev, damage_dealt):
    before = jnp.sum(inventory.potions - inventory_diff.potions)
    found = jnp.minimum(jnp.sum(inventory.potions), 1) - jnp.minimum(before, 1)
    chest_before = jnp.sum(jnp.abs(closest_blocks_prev[BlockType.CHEST.value, :, 0]))
    chest_now = jnp.sum(jnp.abs(closest_blocks[BlockType.CHEST.value, :, 0]))
    closer = jnp.minimum(chest_before, 8) - jnp.minimum(chest_now, 8)
    return found + 0.05 * closer + 0.1 * damage_dealt
