"""Sleep in a shelter once more until it grows light."""

name = "Spend Second Night"
requirements = {"night_spent": "1", "sheltered": "1", "fed": "1"}
consumption = {"fed": "1"}
gain = {"second_night_spent": "1"}
like = "Spend Night"
max_steps = 400
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


def _is_morning(episode_timestep):
    """True when it grows light: days have 300 timesteps, and the 210th is the darkest."""
    return episode_timestep % 300 >= 270


def task_is_done(episode_timestep):
    return _is_morning(episode_timestep)


def task_reward(episode_timestep, player_intrinsics_diff, local_map):
    drank = jnp.maximum(player_intrinsics_diff[2], 0)
    slept = jnp.maximum(player_intrinsics_diff[3], 0)
    needs = 0.1 * (player_intrinsics_diff[0] + drank + slept)
    hidden = 0.02 * (_room(local_map) <= 3)
    return needs + jnp.where(_is_morning(episode_timestep), 2.0, hidden)
