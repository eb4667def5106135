"""Find a fire elemental and defeat it; little but ice hurts it."""

name = "Defeat Fire Elemental"
requirements = {"sword": "4", "ice_sword": "1"}
gain = {"defeated_fire_elemental": "1"}
floors = [6]


def task_is_done(achievements):
    return achievements[Achievement.DEFEAT_FIRE_ELEMENTAL.value] > 0


def task_reward(achievements_diff, closest_mobs, closest_mobs_prev, damage_dealt):
    before = jnp.sum(jnp.abs(closest_mobs_prev[MobType.RANGED.value, 6]))
    now = jnp.sum(jnp.abs(closest_mobs[MobType.RANGED.value, 6]))
    closer = jnp.minimum(before, 8) - jnp.minimum(now, 8)
    reached = achievements_diff[Achievement.DEFEAT_FIRE_ELEMENTAL.value]
    # The mob that is gone because of it was not lost sight of.
    return jnp.where(reached > 0, 1.0, 0.1 * closer + 0.1 * damage_dealt)
