"""Learning from the columns of the observations that are in use.

Craftax's observations are one-hots of the cells in view, and most kinds of block are in view
nowhere. Of a rollout's columns a third to a half are zero in every row, of full Craftax's, which
has nine floors, four fifths. Such a column adds nothing to a first layer, and the gradient of its
weights is exactly zero. So an update counts the columns in use and learns with the fewest of
`widths_for` that hold them: the first layer's products, two thirds of the work, and Adam's work
shrink with them. The other weights move by their momentum only, which takes one formula
(`optimizer.decay_unused`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from flowrl.config import PPOConfig
from flowrl.networks.grouped import Packed
from flowrl.ppo import optimizer
from flowrl.ppo.loss import Hyperparameters
from flowrl.ppo.rollout import RolloutBatch, merge_shards
from flowrl.ppo.sharding import ONE_DEVICE, Axis
from flowrl.ppo.update import Stats, TrainState, all_finite, learn

_SHARES, _LARGE = (0.3, 0.7), 4096  # columns from which more than the last share is compiled
_MULTIPLE = 64
_MOST_NUMBERED = 2**31 - 1


class Columns(NamedTuple):
    """All columns, those in use first, and where each of them is then."""

    order: jax.Array  # int32[size]: those in use, in order, then those that are not
    position: jax.Array  # int32[size]: of each column in `order`
    used: jax.Array  # int32, how many are in use


def learn_from_columns(
    config: PPOConfig,
    state: TrainState,
    shards: Sequence[RolloutBatch],
    *,
    minibatches: jax.Array,
    hyper: Hyperparameters,
    axis: Axis = ONE_DEVICE,
) -> tuple[TrainState, Stats]:
    """As `update.learn` of the merged shards, computed with the columns in use if they fit.

    The shards have leaves `[T, B, …]`, observations f32 `[T, B, size]`; grids have no columns to
    leave out. The other arguments are those of `learn`.
    """
    common: Any = {"minibatches": minibatches, "hyper": hyper, "axis": axis}
    if state.params.trunk:
        return learn(config, state, merge_shards(shards), **common)
    columns = columns_in_use([shard.steps.obs for shard in shards], axis)
    widths = [width for width in widths_for(len(columns.order)) if width < len(columns.order)]

    def of_all(state: TrainState) -> tuple[TrainState, Stats]:
        return learn(config, state, merge_shards(shards), **common)

    def of_chosen(width: int, before: TrainState) -> tuple[TrainState, Stats]:
        chosen, others = columns.order[:width], columns.order[width:]
        batch = merge_shards([_select_seen(shard, chosen) for shard in shards])
        kernels = first_kernels(before)
        few = with_first(before, [select_kernel(kernel, chosen) for kernel in kernels])
        few, stats = learn(config, few, batch, **common)
        kernel, first, second = (select_kernel(kernel, others) for kernel in kernels)
        moved, moments = optimizer.decay_unused(
            kernel,
            (first, second),
            taken=before.opt_state[1].count,
            steps=stats.moves,
            most=len(minibatches),
            lr=hyper.lr,
        )
        parts = zip(first_kernels(few), (moved, *moments), strict=True)
        whole = [select_kernel(jnp.concatenate(two, axis=1), columns.position) for two in parts]
        return with_first(few, whole), stats._replace(finite=stats.finite & all_finite(moved))

    branches = [*(partial(of_chosen, width) for width in widths), of_all]
    too_small = sum((columns.used > width for width in widths), start=jnp.int32(0))
    return jax.lax.switch(too_small, branches, state)


def widths_for(size: int) -> tuple[int, ...]:
    """Return how many of an observation's columns may be learned from, in rising order."""
    shares = _SHARES if size >= _LARGE else _SHARES[-1:]
    return tuple(min(size, _MULTIPLE * math.ceil(share * size / _MULTIPLE)) for share in shares)


def columns_in_use(obs: Sequence[jax.Array], axis: Axis = ONE_DEVICE) -> Columns:
    """The columns in which some row of the observations, f32 `[…, size]` each, is not zero.

    The rows of all devices of `axis` count: devices that cut out other columns would average the
    gradients of different weights.
    """
    # The greatest of many numbers is found in half the time of whether any is not zero.
    greatest = [jnp.abs(part).reshape(-1, part.shape[-1]).max(axis=0) for part in obs]
    used = axis.any(jnp.stack(greatest).max(axis=0) != 0)
    order = jnp.argsort(~used, stable=True).astype(jnp.int32)
    position = jnp.argsort(order).astype(jnp.int32)
    return Columns(order, position, used.sum())


def select_obs(obs: jax.Array, columns: jax.Array) -> jax.Array:
    """These columns, int32 `[width]`, of observations f32 `[…, size]`: f32 `[…, width]`."""
    *batch, size = obs.shape
    if obs.size > _MOST_NUMBERED:
        return obs[..., columns]
    # Number by number: to take whole columns, XLA:CPU turns all observations around, and back.
    rows = jnp.arange(math.prod(batch), dtype=jnp.int32)
    numbers = (rows * size)[:, None] + columns
    values = obs.reshape(-1).at[numbers].get(mode="promise_in_bounds")
    return values.reshape(*batch, len(columns))


def select_kernel(kernel: jax.Array, columns: jax.Array) -> jax.Array:
    """Weights f32 `[E, columns, layer]` of these observation columns, from `[E, size, layer]`."""
    num_experts, size, width = kernel.shape
    rows = (jnp.arange(num_experts, dtype=jnp.int32) * size)[:, None] + columns
    return kernel.reshape(num_experts * size, width).at[rows].get(mode="promise_in_bounds")


def first_kernels(tree: Any) -> list[jax.Array]:
    """The kernels of the first layers, f32 `[E, size, layer]`, of all packed experts in a tree."""
    nodes = jax.tree.leaves(tree, is_leaf=_is_packed)
    return [node.first.kernel for node in nodes if _is_packed(node)]


def with_first(tree: Any, kernels: Sequence[jax.Array]) -> Any:
    """The tree with other kernels of the first layers, in the order of `first_kernels`."""
    rest = iter(kernels)

    def changed(node: Any) -> Any:
        if not _is_packed(node):
            return node
        return node._replace(first=node.first._replace(kernel=next(rest)))

    return jax.tree.map(changed, tree, is_leaf=_is_packed)


def _select_seen(batch: RolloutBatch, columns: jax.Array) -> RolloutBatch:
    return batch._replace(steps=batch.steps._replace(obs=select_obs(batch.steps.obs, columns)))


def _is_packed(node: Any) -> bool:
    return isinstance(node, Packed)
