"""Find an orc mage in the dungeon and defeat it."""

name = "Defeat Orc Mage"
requirements = {"sword": "1"}
gain = {"defeated_orc_mage": "1"}
floors = [1]


def task_is_done(achievements):
    return achievements[Achievement.DEFEAT_ORC_MAGE.value] > 0


def task_reward(achievements_diff, closest_mobs, closest_mobs_prev, damage_dealt):
    before = jnp.sum(jnp.abs(closest_mobs_prev[MobType.RANGED.value, 2]))
    now = jnp.sum(jnp.abs(closest_mobs[MobType.RANGED.value, 2]))
    closer = jnp.minimum(before, 8) - jnp.minimum(now, 8)
    reached = achievements_diff[Achievement.DEFEAT_ORC_MAGE.value]
    # The mob that is gone because of it was not lost sight of.
    return jnp.where(reached > 0, 1.0, 0.1 * closer + 0.1 * damage_dealt)
