"""Adam for each expert by itself: an expert that did not act does not move."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from flowrl.config import PPOConfig

if TYPE_CHECKING:
    import optax

_EPSILON = 1e-5


def init(config: PPOConfig, params: Any) -> Any:
    """Moments and step counts with the leading axis of the experts."""
    return jax.vmap(_adam(config).init)(params)


def step(
    config: PPOConfig, *, params: Any, state: Any, grads: Any, rows: jax.Array, lr: jax.Array
) -> tuple[Any, Any]:
    """Move the experts that have rows, each clipped to its own gradient norm.

    Adam (Kingma & Ba 2015, arXiv:1412.6980, algorithm 1) keeps moving a parameter by its momentum
    after its gradient is zero, so an expert without rows keeps its parameters, its moments and
    its step count, bit for bit. One norm over all experts would let the steepest of them
    shorten the steps of the others; hence one per expert.

    Args:
      config: the greatest gradient norm.
      params, state, grads: trees with leaves `[E, …]`.
      rows: int32 `[E]`, rows of each expert in this minibatch.
      lr: f32 scalar.
    """
    moves, moved = jax.vmap(_adam(config).update)(grads, state)
    stepped = jax.tree.map(lambda param, move: param - lr * move, params, moves)
    return _where_rows(rows, stepped, params), _where_rows(rows, moved, state)


def _adam(config: PPOConfig) -> optax.GradientTransformation:
    import optax  # only who traces needs it

    return optax.chain(
        optax.clip_by_global_norm(config.max_grad_norm), optax.scale_by_adam(eps=_EPSILON)
    )


def _where_rows(rows: jax.Array, new: Any, old: Any) -> Any:
    def choose(fresh: jax.Array, stale: jax.Array) -> jax.Array:
        acted = (rows > 0).reshape(-1, *[1] * (fresh.ndim - 1))
        return jnp.where(acted, fresh, stale)

    return jax.tree.map(choose, new, old)
