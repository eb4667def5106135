"""Sit down when hurt, and get up in full health."""

name = "Rest"
gain = {"rested": "1"}
max_steps = 600  # a point of health comes back in 26 timesteps


def task_is_done(is_resting_diff, player_intrinsics):
    return jnp.logical_and(is_resting_diff < 0, player_intrinsics[0] >= 9)


def task_reward(is_resting_diff, player_intrinsics, player_intrinsics_diff):
    rested = jnp.logical_and(is_resting_diff < 0, player_intrinsics[0] >= 9)
    return 1.0 * rested + 0.1 * is_resting_diff + 0.1 * player_intrinsics_diff[0]
