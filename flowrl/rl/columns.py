"""Learning from the columns of the observations in which there is something.

Craftax's observations are one-hots of the cells in view, and most kinds of block are in view
nowhere: of a rollout's columns a third to a half are zero in every row. Such a column adds nothing
to a first layer, and the gradient of its weights is exactly zero. So the columns are counted once
per update, and where those in use fit into `width_for` of them, gradients are taken over these
alone. The first layer's products, two thirds of the work, shrink with them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from flowrl.models.packed import Packed

_SHARE, _MULTIPLE = 0.65, 64


class Columns(NamedTuple):
    """Columns that hold all that is not zero, if they fit."""

    chosen: jax.Array  # int32[width]: those in use, in order, then some that are not
    fit: jax.Array  # bool, whether all columns in use are chosen


def width_for(size: int) -> int:
    """How many of an observation's columns are learned from."""
    return min(size, _MULTIPLE * math.ceil(_SHARE * size / _MULTIPLE))


def columns_of(obs: jax.Array) -> Columns:
    """The columns in use in observations f32 `[N, size]`."""
    used = (obs != 0).any(axis=0)
    width = width_for(obs.shape[-1])
    chosen = jnp.argsort(~used, stable=True)[:width].astype(jnp.int32)
    return Columns(chosen, used.sum() <= width)


def narrowed(packed: Packed, chosen: jax.Array) -> Packed:
    """The same experts for observations of these columns alone."""
    kernel = packed.first.kernel[:, chosen]
    return packed._replace(first=packed.first._replace(kernel=kernel))


def broadened(grads: Packed, chosen: jax.Array, size: int) -> Packed:
    """Gradients of narrowed experts as those of whole ones: zero in the other columns."""
    narrow = grads.first.kernel
    whole = jnp.zeros((narrow.shape[0], size, narrow.shape[2]), narrow.dtype)
    kernel = whole.at[:, chosen].set(narrow, unique_indices=True)
    return grads._replace(first=grads.first._replace(kernel=kernel))
