"""Find a zombie on the grass and defeat it; drink and eat, for it may take until the night."""

name = "Defeat Zombie"
requirements = {"sword": "1"}
gain = {"defeated_zombie": "1"}
floors = [0]
max_steps = 600
training = {"total_timesteps": 3_000_000}


def task_is_done(achievements):
    return achievements[Achievement.DEFEAT_ZOMBIE.value] > 0


def task_reward(
    achievements_diff, closest_mobs, closest_mobs_prev, damage_dealt, player_intrinsics_diff
):
    before = jnp.sum(jnp.abs(closest_mobs_prev[MobType.MELEE.value, 0]))
    now = jnp.sum(jnp.abs(closest_mobs[MobType.MELEE.value, 0]))
    closer = jnp.minimum(before, 8) - jnp.minimum(now, 8)
    fed = jnp.sum(jnp.maximum(player_intrinsics_diff[1:3], 0))
    reached = achievements_diff[Achievement.DEFEAT_ZOMBIE.value]
    # The mob that is gone because of it was not lost sight of.
    return jnp.where(reached > 0, 1.0, 0.1 * closer + 0.1 * damage_dealt + 0.05 * fed)
