"""Learning from the columns of the observations in which there is something.

Craftax's observations are one-hots of the cells in view, and most kinds of block are in view
nowhere: of a rollout's columns a third to a half are zero in every row. Such a column adds nothing
to a first layer, and the gradient of its weights is exactly zero. So the columns are counted once
per update, and where those in use fit into `width_for` of them, an update learns with these alone:
the first layer's products, two thirds of the work, shrink with them, and Adam's work, too. What
Adam makes of the other weights, which coast by their momentum, takes one formula
(`optimizer.coasted`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from flowrl.networks.packed import Packed

_SHARE, _MULTIPLE = 0.7, 64
_MOST_NUMBERED = 2**31 - 1


class Columns(NamedTuple):
    """All columns, those in use first, and where each of them is then."""

    chosen: jax.Array  # int32[width]: those in use, in order, then some that are not
    others: jax.Array  # int32[size - width]
    place: jax.Array  # int32[size]: where each column is in `chosen` and `others` together
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
    place = jnp.argsort(order).astype(jnp.int32)
    return Columns(order[:width], order[width:], place, used.sum() <= width)


def cut_out(obs: jax.Array, columns: jax.Array) -> jax.Array:
    """These columns of observations f32 `[N, size]`."""
    rows, size = obs.shape
    if obs.size > _MOST_NUMBERED:
        return obs[:, columns]
    # Number by number: to take whole columns, XLA:CPU turns all observations around, and back.
    places = (jnp.arange(rows, dtype=jnp.int32) * size)[:, None] + columns
    return obs.reshape(-1).at[places].get(mode="promise_in_bounds")


def taken(tree: Any, columns: jax.Array) -> Any:
    """The same, with all experts in it for observations of these columns alone."""
    return _with_first(tree, lambda kernel: _columns(kernel, columns))


def joined(tree: Any, others: Iterable[jax.Array], columns: Columns) -> Any:
    """A tree of the chosen columns made whole by the first kernels of the others."""
    rests = iter(others)

    def whole(kernel: jax.Array) -> jax.Array:
        return _columns(jnp.concatenate([kernel, next(rests)], axis=1), columns.place)

    return _with_first(tree, whole)


def first_kernels(tree: Any) -> list[jax.Array]:
    """The kernels of the first layers, f32 `[E, observation, width]`, of all experts in a tree."""
    nodes = jax.tree.leaves(tree, is_leaf=_is_packed)
    return [node.first.kernel for node in nodes if isinstance(node, Packed)]


def _columns(kernel: jax.Array, columns: jax.Array) -> jax.Array:
    """Weights f32 `[E, columns, width]` of these observation columns."""
    num_experts, size, width = kernel.shape
    rows = (jnp.arange(num_experts, dtype=jnp.int32) * size)[:, None] + columns
    return kernel.reshape(num_experts * size, width).at[rows].get(mode="promise_in_bounds")


def _with_first(tree: Any, change: Callable[[jax.Array], jax.Array]) -> Any:
    def changed(node: Any) -> Any:
        if not isinstance(node, Packed):
            return node
        return node._replace(first=node.first._replace(kernel=change(node.first.kernel)))

    return jax.tree.map(changed, tree, is_leaf=_is_packed)


def _is_packed(node: Any) -> bool:
    return isinstance(node, Packed)
