"""Eat and drink near the plant until the evening."""

name = "Graze"
requirements = {"home": "1"}
consumption = {}
gain = {"fed": "1"}
like = "Eat Cow"
max_steps = 300
training = {"total_timesteps": 3_000_000}


def _is_evening(episode_timestep):
    """True before it is darkest: days have 300 timesteps, and nights begin about the 150th."""
    return jnp.logical_and(episode_timestep % 300 >= 130, episode_timestep % 300 < 270)


def task_is_done(player_intrinsics, closest_blocks, episode_timestep):
    fed = jnp.logical_and(player_intrinsics[1] >= 7, player_intrinsics[2] >= 7)
    plant = jnp.sum(jnp.abs(closest_blocks[BlockType.PLANT.value, :, 0]))
    ripe = jnp.sum(jnp.abs(closest_blocks[BlockType.RIPE_PLANT.value, :, 0]))
    home = jnp.minimum(plant, ripe) <= 8
    return jnp.logical_and(_is_evening(episode_timestep), jnp.logical_and(fed, home))


def task_reward(
    player_intrinsics,
    player_intrinsics_diff,
    nearest_mobs,
    nearest_mobs_prev,
    closest_blocks,
    closest_blocks_prev,
    damage_dealt,
    episode_timestep,
):
    hungry = 1.0 * (player_intrinsics[1] < 7)
    thirsty = 1.0 * (player_intrinsics[2] < 7)
    fed = (1.0 - hungry) * (1.0 - thirsty)
    plant = jnp.sum(jnp.abs(closest_blocks[BlockType.PLANT.value, :, 0]))
    plant_before = jnp.sum(jnp.abs(closest_blocks_prev[BlockType.PLANT.value, :, 0]))
    to_plant = jnp.minimum(plant_before, 8) - jnp.minimum(plant, 8)
    water = jnp.sum(jnp.abs(closest_blocks[BlockType.WATER.value, :, 0]))
    water_before = jnp.sum(jnp.abs(closest_blocks_prev[BlockType.WATER.value, :, 0]))
    to_water = jnp.minimum(water_before, 8) - jnp.minimum(water, 8)
    cow = jnp.sum(jnp.abs(nearest_mobs[1]))
    cow_before = jnp.sum(jnp.abs(nearest_mobs_prev[1]))
    to_cow = jnp.minimum(cow_before, 8) - jnp.minimum(cow, 8)
    ate = jnp.maximum(player_intrinsics_diff[1], 0)
    drank = jnp.maximum(player_intrinsics_diff[2], 0)
    # The cow that is gone because it was eaten was not lost sight of.
    ways = 0.05 * hungry * (ate == 0) * to_cow + 0.03 * thirsty * to_water + 0.05 * fed * to_plant
    needs = 0.15 * ate + 0.1 * drank + 0.1 * player_intrinsics_diff[0]
    return _is_evening(episode_timestep) * fed * (plant <= 8) + ways + needs + 0.1 * damage_dealt
