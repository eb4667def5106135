"""Wait near the plant until it is ripe, 600 timesteps after it was placed, and eat it."""

name = "Eat Plant"
requirements = {"planted": "1", "sword": "1"}
gain = {"ate_plant": "1"}
floors = [0]
max_steps = 900  # to ripen, and to find the way back
training = {"total_timesteps": 1_000_000}


def task_is_done(achievements):
    return achievements[Achievement.EAT_PLANT.value] > 0


def task_reward(achievements_diff, player_intrinsics_diff, closest_blocks, damage_dealt):
    plant = jnp.sum(jnp.abs(closest_blocks[BlockType.PLANT.value, :, 0]))
    ripe = jnp.sum(jnp.abs(closest_blocks[BlockType.RIPE_PLANT.value, :, 0]))
    beside = 0.002 * (plant <= 8) + 0.01 * (ripe <= 8) + 0.05 * (ripe <= 1)
    fed = 0.1 * (jnp.maximum(player_intrinsics_diff[1], 0) + player_intrinsics_diff[0])
    eaten = achievements_diff[Achievement.EAT_PLANT.value]
    return jnp.where(eaten > 0, 2.0, beside + fed + 0.1 * damage_dealt)
