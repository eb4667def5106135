"""Sight: columns beside the game's observation; a leaf of pure functions.

They are functions of the observation and of the plan's step, so nothing hidden is told. In order:
what the step still lacks and the time it has left (both by `SkillEnv`), of each channel of the map
the nearest cell, what is in front of the player, and where the player has been in this step.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from flowrl.games.base import SIGHT_WINDOW

_SCALE = 0.25  # of an offset in cells
_MARGIN = SIGHT_WINDOW // 2  # cells around the world, so that the window never leaves the array


def nearest(observation: jax.Array, view: tuple[int, int, int]) -> jax.Array:
    """The nearest cell of each channel of the map that an observation begins with.

    Args:
      observation: f32 `[observation_size]`.
      view: rows R, columns C and channels K of the map; the player is in the middle.

    Returns:
      f32 `[5 K]`: offsets down and right, their signs, and 1 / (1 + distance); 0 without a cell.
    """
    rows, columns, channels = view
    offsets = _offsets(rows, columns)
    order = (offsets[:, 0] + rows // 2) * columns + offsets[:, 1] + columns // 2
    cells = observation[: rows * columns * channels].reshape(-1, channels)[order] > 0
    first = jnp.argmax(cells, axis=0)
    there = cells.any(axis=0)
    places = jnp.asarray(_columns(offsets))[first]
    return jnp.where(there[:, None], places, 0.0).ravel()


def ahead(observation: jax.Array, view: tuple[int, int, int], heading: int) -> jax.Array:
    """The channels of the cell in front of the player.

    Args:
      observation: f32 `[observation_size]`.
      view: rows R, columns C and channels K of the map; the player is in the middle.
      heading: where the four columns begin of which one is 1: left, right, up, down.

    Returns:
      f32 `[K]`.
    """
    rows, columns, channels = view
    middle = (rows // 2) * columns + columns // 2
    around = middle + np.array([-1, 1, -columns, columns])
    cells = observation[: rows * columns * channels].reshape(-1, channels)[around]
    return observation[heading : heading + len(around)] @ cells


def _offsets(rows: int, columns: int) -> np.ndarray:
    """int `[R C, 2]`: the cells in view from the player, nearest first, then by row and column."""
    cells = np.indices((rows, columns)).reshape(2, -1).T - [rows // 2, columns // 2]
    return cells[np.lexsort((cells[:, 1], cells[:, 0], np.abs(cells).sum(1)))]


def _columns(offsets: np.ndarray) -> np.ndarray:
    """f32 `[cells, 5]`: the columns of each cell."""
    nearness = 1.0 / (1.0 + np.abs(offsets).sum(axis=1, keepdims=True))
    return np.hstack([_SCALE * offsets, np.sign(offsets), nearness]).astype(np.float32)


def not_visited(cells: tuple[int, int]) -> jax.Array:
    """bool `[rows + margins, columns + margins]`: no cell of the world was visited."""
    return jnp.zeros([size + 2 * _MARGIN for size in cells], bool)


def visit(visited: jax.Array, cell: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The cells visited with `cell`, int32 `[2]`, among them; and whether it is new, bool `[]`."""
    row, column = cell + _MARGIN
    return visited.at[row, column].set(True), ~visited[row, column]


def window(visited: jax.Array, cell: jax.Array) -> jax.Array:
    """f32 `[SIGHT_WINDOW²]`: which cells around `cell`, int32 `[2]`, were visited."""
    around = jax.lax.dynamic_slice(visited, cell, (SIGHT_WINDOW, SIGHT_WINDOW))
    return around.ravel().astype(jnp.float32)
