"""Sleep in a shelter near the plant until it is light again and the player is hungry."""

name = "Spend Night"
requirements = {"home": "1", "fed": "1", "stone": "2"}
consumption = {"fed": "1"}
gain = {"night_spent": "1"}
max_steps = 400
training = {"total_timesteps": 3_000_000}


def _spread(cells, free):
    across = jnp.logical_or(jnp.roll(cells, 1, 1), jnp.roll(cells, -1, 1))
    along = jnp.logical_or(jnp.roll(cells, 1, 0), jnp.roll(cells, -1, 0))
    return jnp.logical_or(cells, jnp.logical_and(free, jnp.logical_or(across, along)))


def _is_shelter(local_map):
    """Whether the player stands in at most three joined open cells."""
    grass = local_map == BlockType.GRASS.value
    sand = local_map == BlockType.SAND.value
    path = local_map == BlockType.PATH.value
    free = jnp.logical_or(jnp.logical_or(grass, sand), path)
    cells = jnp.zeros_like(free).at[3, 4].set(True)
    cells = _spread(_spread(_spread(cells, free), free), free)
    return 1.0 * (jnp.sum(cells) <= 3)


def _is_morning(light_level, player_intrinsics):
    """Whether the night is over: who began it fed is hungry by then, who slept is not tired."""
    rested = jnp.logical_and(player_intrinsics[1] <= 4, player_intrinsics[3] >= 4)
    return jnp.logical_and(light_level > 0.5, rested)


def task_is_done(light_level, player_intrinsics, closest_blocks):
    plant = jnp.sum(jnp.abs(closest_blocks[BlockType.PLANT.value, :, 0]))
    ripe = jnp.sum(jnp.abs(closest_blocks[BlockType.RIPE_PLANT.value, :, 0]))
    home = jnp.minimum(plant, ripe) <= 8
    return jnp.logical_and(home, _is_morning(light_level, player_intrinsics))


def task_reward(
    light_level,
    player_intrinsics,
    player_intrinsics_diff,
    local_map,
    closest_blocks,
    closest_blocks_prev,
    damage_dealt,
):
    plant = jnp.sum(jnp.abs(closest_blocks[BlockType.PLANT.value, :, 0]))
    plant_before = jnp.sum(jnp.abs(closest_blocks_prev[BlockType.PLANT.value, :, 0]))
    to_plant = jnp.minimum(plant_before, 8) - jnp.minimum(plant, 8)
    spent = (plant <= 8) * _is_morning(light_level, player_intrinsics)
    drank = jnp.maximum(player_intrinsics_diff[2], 0)
    slept = jnp.maximum(player_intrinsics_diff[3], 0)
    needs = 0.1 * (player_intrinsics_diff[0] + drank + slept)
    return spent + 0.02 * _is_shelter(local_map) + needs + 0.05 * to_plant + 0.1 * damage_dealt
