"""Wait until the plant is ripe, about 600 steps, and eat it."""

name = "Eat Plant"
requirements = {"facing_plant": "1"}
consumption = {}
gain = {"ate_plant": "1"}
max_steps = 900  # to ripen, and to come back from the water


def task_is_done(achievements):
    return achievements[Achievement.EAT_PLANT.value] > 0


def task_reward(achievements_diff, closest_blocks, closest_blocks_prev, player_intrinsics_diff):
    plant = jnp.sum(jnp.abs(closest_blocks[BlockType.PLANT.value, :, 0]))
    ripe = jnp.sum(jnp.abs(closest_blocks[BlockType.RIPE_PLANT.value, :, 0]))
    plant_before = jnp.sum(jnp.abs(closest_blocks_prev[BlockType.PLANT.value, :, 0]))
    ripe_before = jnp.sum(jnp.abs(closest_blocks_prev[BlockType.RIPE_PLANT.value, :, 0]))
    before = jnp.minimum(jnp.minimum(plant_before, ripe_before), 8)
    closer = before - jnp.minimum(jnp.minimum(plant, ripe), 8)
    eaten = achievements_diff[Achievement.EAT_PLANT.value]
    return 1.0 * eaten + 0.05 * closer + 0.05 * player_intrinsics_diff[0]
