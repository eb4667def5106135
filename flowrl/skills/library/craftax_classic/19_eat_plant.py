"""Stay alive until the plant is ripe, 600 steps after it was placed, then go back and eat it."""

name = "Eat Plant"
requirements = {"planted": "1", "stone_sword": "1", "ate_cow": "1", "drank": "1"}
consumption = {}
gain = {"ate_plant": "1"}
max_steps = 900  # to ripen, and to find the way back
training = {"total_timesteps": 3_000_000}


def task_is_done(achievements):
    return achievements[Achievement.EAT_PLANT.value] > 0


def task_reward(
    achievements_diff,
    closest_blocks,
    closest_blocks_prev,
    player_intrinsics_diff,
    damage_dealt,
):
    plant = jnp.sum(jnp.abs(closest_blocks[BlockType.RIPE_PLANT.value, :, 0]))
    plant_before = jnp.sum(jnp.abs(closest_blocks_prev[BlockType.RIPE_PLANT.value, :, 0]))
    closer = jnp.minimum(plant_before, 8) - jnp.minimum(plant, 8)
    needs = 0.1 * player_intrinsics_diff[0] + 0.05 * jnp.sum(player_intrinsics_diff[1:])
    eaten = achievements_diff[Achievement.EAT_PLANT.value]
    # The ripe plant that is gone because of it was not lost sight of.
    return jnp.where(eaten > 0, 1.0, 0.01 + 0.1 * closer + needs + 0.1 * damage_dealt)
