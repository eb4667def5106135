"""Find a zombie on the grass and defeat it."""

name = "Defeat Zombie"
gain = {"defeated_zombie": "1"}
floors = [0]


def task_is_done(achievements):
    return achievements[Achievement.DEFEAT_ZOMBIE.value] > 0


def task_reward(achievements_diff, closest_mobs, closest_mobs_prev, damage_dealt):
    before = jnp.sum(jnp.abs(closest_mobs_prev[MobType.MELEE.value, 0]))
    now = jnp.sum(jnp.abs(closest_mobs[MobType.MELEE.value, 0]))
    closer = jnp.minimum(before, 8) - jnp.minimum(now, 8)
    reached = achievements_diff[Achievement.DEFEAT_ZOMBIE.value]
    # The mob that is gone because of it was not lost sight of.
    return jnp.where(reached > 0, 1.0, 0.1 * closer + 0.1 * damage_dealt)
