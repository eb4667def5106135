"""Find a chest and open it."""

name = "Open Chest"
gain = {"opened_chest": "1"}
floors = [1, 3, 4]


def task_is_done(achievements):
    return achievements[Achievement.OPEN_CHEST.value] > 0


def task_reward(achievements_diff, closest_blocks, closest_blocks_prev, damage_dealt):
    found = achievements_diff[Achievement.OPEN_CHEST.value]
    chest_before = jnp.sum(jnp.abs(closest_blocks_prev[BlockType.CHEST.value, :, 0]))
    chest_now = jnp.sum(jnp.abs(closest_blocks[BlockType.CHEST.value, :, 0]))
    closer = jnp.minimum(chest_before, 8) - jnp.minimum(chest_now, 8)
    return found + 0.05 * closer + 0.1 * damage_dealt
