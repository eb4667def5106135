"""Fight until hurt, win, sit down, and get up in full health. Who is whole cannot sit down."""

name = "Rest"
requirements = {"sword": "1"}
gain = {"rested": "1"}
max_steps = 600  # a point of health comes back in 26 timesteps
training = {"total_timesteps": 1_000_000}


def task_is_done(is_resting_diff, player_intrinsics):
    return jnp.logical_and(is_resting_diff < 0, player_intrinsics[0] >= 9)


def task_reward(
    is_resting_diff,
    player_intrinsics,
    player_intrinsics_diff,
    closest_mobs,
    closest_mobs_prev,
    damage_dealt,
):
    before = jnp.sum(jnp.abs(closest_mobs_prev[MobType.MELEE.value, 0]))
    now = jnp.sum(jnp.abs(closest_mobs[MobType.MELEE.value, 0]))
    whole = player_intrinsics[0] >= 9
    to_fight = whole * (jnp.minimum(before, 8) - jnp.minimum(now, 8))
    rested = jnp.logical_and(is_resting_diff < 0, whole)
    healed = jnp.maximum(player_intrinsics_diff[0], 0)
    return 1.0 * rested + 0.1 * (is_resting_diff + healed + damage_dealt) + 0.05 * to_fight
