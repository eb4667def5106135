"""Find a skeleton in the caves and defeat it."""

name = "Defeat Skeleton"
requirements = {"sword": "2", "pickaxe": "1"}
gain = {"defeated_skeleton": "1"}
floors = [0]
training = {"total_timesteps": 3_000_000}


def task_is_done(achievements):
    return achievements[Achievement.DEFEAT_SKELETON.value] > 0


def task_reward(achievements_diff, closest_mobs, closest_mobs_prev, damage_dealt):
    before = jnp.sum(jnp.abs(closest_mobs_prev[MobType.RANGED.value, 0]))
    now = jnp.sum(jnp.abs(closest_mobs[MobType.RANGED.value, 0]))
    closer = jnp.minimum(before, 8) - jnp.minimum(now, 8)
    reached = achievements_diff[Achievement.DEFEAT_SKELETON.value]
    # The mob that is gone because of it was not lost sight of.
    return jnp.where(reached > 0, 1.0, 0.1 * closer + 0.1 * damage_dealt)
