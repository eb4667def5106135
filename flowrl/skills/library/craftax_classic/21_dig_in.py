"""Dig into rock, and close the hole with a stone: a shelter."""

name = "Dig In"
requirements = {"home": "1", "wood_pickaxe": "1"}
consumption = {}
gain = {"sheltered": "1"}
ephemeral = ["sheltered"]
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


def task_is_done(local_map):
    return _room(local_map) <= 3


def task_reward(local_map, local_map_prev, damage_dealt):
    before = jnp.minimum(_room(local_map_prev), 13)
    room = jnp.minimum(_room(local_map), 13)
    return 2.0 * (room <= 3) + 0.1 * (before - room) + 0.1 * damage_dealt
