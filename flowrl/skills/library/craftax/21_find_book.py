"""Open a chest of the sewers; the first holds a book."""

name = "Find Book"
gain = {"books": "1"}
floors = [3]


def task_is_done(inventory):
    return inventory.books >= 1


def task_reward(inventory, inventory_diff, closest_blocks, closest_blocks_prev, damage_dealt):
    before = inventory.books - inventory_diff.books
    found = jnp.minimum(inventory.books, 1) - jnp.minimum(before, 1)
    chest_before = jnp.sum(jnp.abs(closest_blocks_prev[BlockType.CHEST.value, :, 0]))
    chest_now = jnp.sum(jnp.abs(closest_blocks[BlockType.CHEST.value, :, 0]))
    closer = jnp.minimum(chest_before, 8) - jnp.minimum(chest_now, 8)
    return found + 0.05 * closer + 0.1 * damage_dealt
