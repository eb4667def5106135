"""Live beside a plant until it is ripe, about 600 steps, and eat it."""

name = "Eat Plant"
requirements = {"facing_plant": "1", "stone_sword": "1"}
consumption = {}
gain = {"ate_plant": "1"}
max_steps = 900  # to ripen, and to come back from the water
training = {"gamma": 0.997}


def task_is_done(achievements):
    return achievements[Achievement.EAT_PLANT.value] > 0


def task_reward(
    achievements_diff, closest_blocks, closest_blocks_prev, player_intrinsics_diff, damage_dealt
):
    plant = jnp.sum(jnp.abs(closest_blocks[BlockType.PLANT.value, :, 0]))
    ripe = jnp.sum(jnp.abs(closest_blocks[BlockType.RIPE_PLANT.value, :, 0]))
    plant_before = jnp.sum(jnp.abs(closest_blocks_prev[BlockType.PLANT.value, :, 0]))
    ripe_before = jnp.sum(jnp.abs(closest_blocks_prev[BlockType.RIPE_PLANT.value, :, 0]))
    before = jnp.minimum(jnp.minimum(plant_before, ripe_before), 8)
    closer = before - jnp.minimum(jnp.minimum(plant, ripe), 8)
    eaten = 1.0 * achievements_diff[Achievement.EAT_PLANT.value]
    # To eat, drink and sleep is worth something only for what it restores.
    restored = jnp.sum(jnp.maximum(player_intrinsics_diff[1:], 0))
    alive = 0.1 * player_intrinsics_diff[0] + 0.1 * damage_dealt + 0.05 * restored
    return eaten + 0.05 * closer + alive
