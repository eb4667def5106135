"""Find a deep thing in the water of the troll mines and defeat it."""

name = "Defeat Deep Thing"
requirements = {"sword": "4", "armour": "4"}
gain = {"defeated_deep_thing": "1"}
floors = [5]


def task_is_done(achievements):
    return achievements[Achievement.DEFEAT_DEEP_THING.value] > 0


def task_reward(achievements_diff, closest_mobs, closest_mobs_prev, damage_dealt):
    before = jnp.sum(jnp.abs(closest_mobs_prev[MobType.RANGED.value, 5]))
    now = jnp.sum(jnp.abs(closest_mobs[MobType.RANGED.value, 5]))
    closer = jnp.minimum(before, 8) - jnp.minimum(now, 8)
    reached = achievements_diff[Achievement.DEFEAT_DEEP_THING.value]
    # The mob that is gone because of it was not lost sight of.
    return jnp.where(reached > 0, 1.0, 0.1 * closer + 0.1 * damage_dealt)
