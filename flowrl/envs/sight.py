"""Sight: columns beside the game's observation; a leaf of pure functions.

They are functions of what was observed in the episode, of the player's own moves and of the plan's
step, so nothing hidden is told. In order: what the step still lacks and the time it has left (both
by `SkillEnv`), of each channel of the map the nearest cell in view, else the one seen last, what is
in front of the player, and where the player has been in this step. Offsets and cells visited are in
the frame of a way, which may be the player's own (`envs.frames`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from flowrl.envs.frames import TURNS, WAYS, turned_cells
from flowrl.games.base import SIGHT_WINDOW

CELL = 4  # fields of the world in a coarse cell, each way
NOWHERE = -(2**20)  # row and column of what was never seen
_SCALE = 0.25  # of an offset in fields
_FAR = 16  # fields: an offset beyond is seen as this one
_MARGIN = SIGHT_WINDOW // 2  # cells around the world, so that the window never leaves the array


def nearest(
    observation: jax.Array,
    view: tuple[int, int, int],
    seen: jax.Array,
    position: jax.Array,
    *,
    way: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The nearest field of each channel of the map, and where it is.

    A channel that is not in view is where it was seen last, until the window is over that place and
    does not show it, because it is gone or in the dark.

    Args:
      observation: f32 `[observation_size]`; begins with the map.
      view: rows R, columns C and channels K of the map; the player is in the middle.
      seen: int32 `[L, 2]`: row and column in the world where each of the first L channels was seen
        last, else NOWHERE; the other channels are not remembered.
      position: int32 `[2]`: row and column of the player.
      way: int32 `[]`: the way in whose frame the offsets are told.

    Returns:
      f32 `[5 K]`: offsets down and right, their signs, and 1 / (1 + distance); 0 without a field.
      int32 `[L, 2]`: `seen`, this view included.
    """
    rows, columns, channels = view
    offsets = jnp.asarray(_offsets(rows, columns))[way]
    order = (offsets[:, 0] + rows // 2) * columns + offsets[:, 1] + columns // 2
    fields = observation[: rows * columns * channels].reshape(-1, channels)[order] > 0
    known = fields.any(axis=0)
    places = offsets[jnp.argmax(fields, axis=0)]
    lasting = len(seen)
    if lasting:
        before = seen - position
        hidden = (jnp.abs(before) > np.array([rows // 2, columns // 2])).any(axis=1)
        remembered = hidden & (seen[:, 0] != NOWHERE)
        places = places.at[:lasting].set(jnp.where(known[:lasting, None], places[:lasting], before))
        known = known.at[:lasting].set(known[:lasting] | remembered)
    now = jnp.where(known[:lasting, None], position + places[:lasting], NOWHERE)
    places = places @ jnp.asarray(TURNS, jnp.int32)[way]
    distance = jnp.abs(places).sum(axis=1, keepdims=True)
    near = _SCALE * jnp.clip(places, -_FAR, _FAR)
    told = jnp.concatenate([near, jnp.sign(places), 1.0 / (1.0 + distance)], axis=1)
    return jnp.where(known[:, None], told, 0.0).astype(jnp.float32).ravel(), now


def ahead(observation: jax.Array, view: tuple[int, int, int], way: jax.Array) -> jax.Array:
    """The channels f32 `[K]` of the field in front of the player.

    `observation` and `view` are those of `nearest`; `way` int32 `[]` is where the player looks.
    """
    rows, columns, channels = view
    around = (WAYS + np.array([rows // 2, columns // 2])) @ [columns, 1]
    return observation[: rows * columns * channels].reshape(-1, channels)[jnp.asarray(around)[way]]


def _offsets(rows: int, columns: int) -> np.ndarray:
    """int32 `[4, R C, 2]`: for each way the fields in view from the player, nearest first.

    Those that are as near come by row and column in the frame of that way.
    """
    fields = np.indices((rows, columns)).reshape(2, -1).T - [rows // 2, columns // 2]
    keys = ((each[:, 1], each[:, 0], np.abs(each).sum(1)) for each in fields @ TURNS)
    return np.stack([fields[np.lexsort(key)] for key in keys]).astype(np.int32)


def not_visited(cells: tuple[int, int]) -> jax.Array:
    """bool `[rows + margins, columns + margins]`: no cell of the world was visited."""
    return jnp.zeros([size + 2 * _MARGIN for size in cells], bool)


def visit(visited: jax.Array, position: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The cells visited with that of `position` among them; and whether it is new, bool `[]`."""
    row, column = position // CELL + _MARGIN
    return visited.at[row, column].set(True), ~visited[row, column]


def window(visited: jax.Array, position: jax.Array, way: jax.Array) -> jax.Array:
    """f32 `[SIGHT_WINDOW²]`: which cells around that of `position` were visited, in a frame."""
    size = SIGHT_WINDOW, SIGHT_WINDOW
    around = jax.lax.dynamic_slice(visited, position // CELL, size).ravel()
    return around[jnp.asarray(turned_cells(*size))[way]].astype(jnp.float32)
