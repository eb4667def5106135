"""Wait near the plant until it is ripe, 600 timesteps after it was placed, and eat it."""

name = "Eat Plant"
requirements = {"home": "1", "second_night_spent": "1"}
consumption = {}
gain = {"ate_plant": "1"}
like = "Graze"
max_steps = 900  # to ripen, and to find the way back
training = {"total_timesteps": 3_000_000}


def _spread(cells, free):
    across = jnp.logical_or(jnp.roll(cells, 1, 1), jnp.roll(cells, -1, 1))
    along = jnp.logical_or(jnp.roll(cells, 1, 0), jnp.roll(cells, -1, 0))
    return jnp.logical_or(cells, jnp.logical_and(free, jnp.logical_or(across, along)))


def _room(local_map):
    """The number of open cells within three steps, that of the player among them."""
    grass = local_map == BlockType.GRASS.value
    sand = local_map == BlockType.SAND.value
    path = local_map == BlockType.PATH.value
    free = jnp.logical_or(jnp.logical_or(grass, sand), path)
    cells = jnp.zeros_like(free).at[3, 4].set(True)
    return jnp.sum(_spread(_spread(_spread(cells, free), free), free))


def task_is_done(achievements):
    return achievements[Achievement.EAT_PLANT.value] > 0


def task_reward(
    achievements_diff,
    light_level,
    player_intrinsics_diff,
    local_map,
    closest_blocks,
    closest_blocks_prev,
    damage_dealt,
):
    plant = jnp.sum(jnp.abs(closest_blocks[BlockType.PLANT.value, :, 0]))
    plant_before = jnp.sum(jnp.abs(closest_blocks_prev[BlockType.PLANT.value, :, 0]))
    to_plant = jnp.minimum(plant_before, 8) - jnp.minimum(plant, 8)
    ripe = jnp.sum(jnp.abs(closest_blocks[BlockType.RIPE_PLANT.value, :, 0]))
    ripe_before = jnp.sum(jnp.abs(closest_blocks_prev[BlockType.RIPE_PLANT.value, :, 0]))
    to_ripe = jnp.minimum(ripe_before, 8) - jnp.minimum(ripe, 8)
    # What ripens in this timestep was not lost sight of, nor is it nearer than before.
    ripens = jnp.logical_and(ripe <= 8, ripe_before > 8)
    ways = jnp.where(ripens, 0.0, 0.05 * (ripe_before > 8) * to_plant + 0.1 * to_ripe)
    ate = jnp.maximum(player_intrinsics_diff[1], 0)
    drank = jnp.maximum(player_intrinsics_diff[2], 0)
    slept = jnp.maximum(player_intrinsics_diff[3], 0)
    needs = 0.1 * (player_intrinsics_diff[0] + ate + drank + slept)
    hidden = 0.02 * jnp.logical_or(light_level < 0.5, plant <= 8) * (_room(local_map) <= 3)
    eaten = achievements_diff[Achievement.EAT_PLANT.value]
    return jnp.where(eaten > 0, 2.0, hidden + ways + needs + 0.1 * damage_dealt)
