"""Strike the necromancer once, when no foe of his first wave is left."""

name = "Damage Necromancer"
requirements = {"sword": "4", "armour": "4"}
gain = {"damaged_necromancer": "1"}
floors = [8]


def task_is_done(boss_progress):
    return boss_progress >= 1


def task_reward(boss_progress_diff, closest_blocks, closest_blocks_prev, damage_dealt):
    boss_before = jnp.sum(jnp.abs(closest_blocks_prev[BlockType.NECROMANCER.value, :, 0]))
    boss_now = jnp.sum(jnp.abs(closest_blocks[BlockType.NECROMANCER.value, :, 0]))
    closer = jnp.minimum(boss_before, 8) - jnp.minimum(boss_now, 8)
    return 1.0 * boss_progress_diff + 0.05 * closer + 0.1 * damage_dealt
