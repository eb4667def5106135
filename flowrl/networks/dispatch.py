"""Rows to experts: every row is evaluated by the one expert that acts in it.

Three methods give the same values and gradients:

* plain: a network, where there is one expert only;
* tiles (CPU): rows are sorted by expert and a loop goes over tiles of one expert each;
* dense (elsewhere): every expert evaluates every row, then the acting one is selected.

The method is chosen when a program is traced, by platform and number of experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from flowrl.networks import grouped
from flowrl.networks.grouped import Packed, forward
from flowrl.networks.moe import take_expert

DispatchMethod = Literal["plain", "tiles", "dense"]


class Evaluation(NamedTuple):
    """Loss over a set of rows, and its gradient."""

    loss: jax.Array  # mean over all rows
    figures: dict[str, jax.Array]  # means over all rows
    grads: Packed
    rows: jax.Array  # int32[E], rows of each expert


def apply(
    packed: Packed,
    obs: jax.Array,
    expert: jax.Array,
    *,
    activation: str,
    method: DispatchMethod | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Logits `[B, actions]` and values `[B]` of observations, by the acting experts.

    Args:
      packed: parameters, leaves `[E, …]`.
      obs: f32 `[B, size]`.
      expert: int32 `[B]`, the acting expert of each row.
      activation: of the hidden layers.
      method: chosen by platform when it is not given.
    """
    match method or _best_method(packed):
        case "plain":
            return forward(take_expert(packed, 0), obs, activation=activation)
        case "dense":
            logits, values = jax.vmap(lambda one: forward(one, obs, activation=activation))(packed)
            row = jnp.arange(obs.shape[0])
            return logits[expert, row], values[expert, row]
        case "tiles":
            return grouped.apply(packed, obs, expert, activation=activation)


def evaluate_rows(
    packed: Packed,
    rows: Any,
    index: jax.Array,
    *,
    row_loss: Callable[[jax.Array, jax.Array, Any], tuple[jax.Array, dict[str, jax.Array]]],
    activation: str,
    method: DispatchMethod | None = None,
) -> Evaluation:
    """Mean loss over some rows, and its gradient.

    Args:
      packed: parameters, leaves `[E, …]`.
      rows: a tree of leaves `[N, …]` with attributes `obs` and `expert`.
      index: int32 `[M]`, the rows to take.
      row_loss: from logits `[B, A]`, values `[B]` and B rows to losses `[B]` and named
        figures `[B]`, each row by itself.
      activation: of the hidden layers.
      method: chosen by platform when it is not given.
    """
    counts = jnp.bincount(rows.expert[index], length=packed.first.kernel.shape[0])
    method = method or _best_method(packed)
    if method == "tiles":
        loss, figures, grads = grouped.evaluate(
            packed, rows, index, row_loss=row_loss, activation=activation
        )
        return Evaluation(loss, figures, grads, counts)
    chosen = jax.tree.map(lambda leaf: leaf[index], rows)

    def mean_loss(packed: Packed) -> tuple[jax.Array, dict[str, jax.Array]]:
        logits, value = apply(
            packed, chosen.obs, chosen.expert, activation=activation, method=method
        )
        return jax.tree.map(jnp.mean, row_loss(logits, value, chosen))

    (loss, figures), grads = jax.value_and_grad(mean_loss, has_aux=True)(packed)
    return Evaluation(loss, figures, grads, counts)


def _best_method(packed: Packed) -> DispatchMethod:
    if packed.first.kernel.shape[0] == 1:
        return "plain"
    return "tiles" if jax.default_backend() == "cpu" else "dense"
