"""The player's own frame: the map turned so that the player looks up; a leaf of pure functions.

No direction of a game's world is special. In the player's frame, states that differ by a turn alone
are one state, and what an expert learns in one of them holds in the others.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

WAYS = np.array([[0, -1], [0, 1], [-1, 0], [1, 0]])  # left, right, up, down: as rows and columns
UP = 2  # the way of a player whose frame is the world's
# int[4, 2, 2]: offset in the world @ TURNS[way] = offset in the frame of a player that looks so.
TURNS = np.array([[[-down, right], [-right, -down]] for down, right in WAYS])
_BACK = TURNS.swapaxes(1, 2)


class Frame(NamedTuple):
    """The turn of a game's observations into the frame of its player, and of actions back."""

    view: tuple[int, int, int]
    """Rows, columns and channels of the map that an observation begins with."""
    heading: int
    """Where in the observation the four columns begin that say the way."""
    moves: tuple[int, int, int, int]
    """The actions that lead left, right, up and down."""

    def turned(self, observation: jax.Array, way: jax.Array) -> jax.Array:
        """An observation f32 `[O]` in the frame of a player that looks that way: its heading is up.

        Of the map it has the square around the player that is in view in every way.
        """
        rows, columns, channels = self.view
        size = rows * columns * channels
        cells = jnp.asarray(turned_cells(rows, columns))[way]
        cells = observation[:size].reshape(-1, channels)[cells].ravel()
        up, start = np.arange(len(WAYS)) == UP, self.heading - size
        rest = observation[size:].at[start : start + len(WAYS)].set(jnp.asarray(up, cells.dtype))
        return jnp.concatenate([cells, rest])

    def action_of(self, choice: jax.Array, way: jax.Array) -> jax.Array:
        """int32 `[]`: the game's action for a choice in the frame of that way."""
        ways = WAYS @ _BACK  # [4, 4, 2]: of each frame's directions in the world
        to = np.array(self.moves)[(ways[:, :, None] == WAYS).all(axis=-1).argmax(axis=-1)]
        moves = choice == jnp.array(self.moves)
        return jnp.where(moves.any(), jnp.asarray(to)[way, jnp.argmax(moves)], choice)


def turned_cells(rows: int, columns: int) -> np.ndarray:
    """int `[4, S²]`: for each way and cell of the turned map its cell in a map of R × C.

    Cells are numbered row by row; S is the less of R and C.
    """
    side = min(rows, columns)
    offsets = np.indices((side, side)).reshape(2, -1).T - side // 2
    return (offsets @ _BACK + [rows // 2, columns // 2]) @ [columns, 1]


def way_of(observation: jax.Array, heading: int) -> jax.Array:
    """int32 `[]`: the way that the player looks; four columns for it begin at `heading`."""
    return jnp.argmax(observation[heading : heading + len(WAYS)]).astype(jnp.int32)
