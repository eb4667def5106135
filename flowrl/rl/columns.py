"""Learning from the columns of the observations in which there is something.

Craftax's observations are one-hots of the cells in view, and most kinds of block are in view
nowhere: of a rollout's columns a third to a half are zero in every row. Such a column adds nothing
to a first layer, and the gradient of its weights is exactly zero. So the columns are counted once
per update, and where those in use fit into `width_for` of them, gradients are taken over these
alone. The first layer's products, two thirds of the work, shrink with them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from flowrl.models.packed import Packed

_SHARE, _MULTIPLE = 0.7, 64


class Columns(NamedTuple):
    """Columns that hold all that is not zero, if they fit."""

    chosen: jax.Array  # int32[width]: those in use, in order, then some that are not
    place: jax.Array  # int32[size]: where in `chosen` each column is; width if it is not
    fit: jax.Array  # bool, whether all columns in use are chosen


def width_for(size: int) -> int:
    """How many of an observation's columns are learned from."""
    return min(size, _MULTIPLE * math.ceil(_SHARE * size / _MULTIPLE))


def columns_of(obs: Sequence[jax.Array]) -> Columns:
    """The columns in use in parts of the observations, f32 `[N, size]` each."""
    # The greatest of many numbers is found in half the time of whether any is not zero.
    used = jnp.stack([jnp.abs(part).max(axis=0) for part in obs]).max(axis=0) != 0
    width = width_for(len(used))
    order = jnp.argsort(~used, stable=True).astype(jnp.int32)
    place = jnp.minimum(jnp.argsort(order).astype(jnp.int32), width)
    return Columns(order[:width], place, used.sum() <= width)


def narrowed(packed: Packed, chosen: jax.Array) -> Packed:
    """The same experts for observations of these columns alone."""
    kernel = packed.first.kernel[:, chosen]
    return packed._replace(first=packed.first._replace(kernel=kernel))


def broadened(grads: Packed, place: jax.Array) -> Packed:
    """Gradients of narrowed experts as those of whole ones: zero in the other columns.

    Taken from where they are and not put where they belong, since XLA:CPU scatters slowly.
    """
    padded = jnp.pad(grads.first.kernel, ((0, 0), (0, 1), (0, 0)))
    kernel = padded[:, place]
    return grads._replace(first=grads.first._replace(kernel=kernel))
