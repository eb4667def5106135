"""Adam for each expert by itself: an expert that did not act does not move."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from flowrl.ppo.loss import Hyperparameters

_EPSILON = 1e-5
_BETA_1, _BETA_2 = 0.9, 0.999
_UNROLLED = 4  # steps of coasting between two passes over the memory


def init(params: Any) -> Any:
    """Moments and step counts with the leading axis of the experts."""
    return jax.vmap(_adam(1.0).init)(params)  # whatever the norm


def step(
    hyper: Hyperparameters, *, params: Any, state: Any, grads: Any, rows: jax.Array
) -> tuple[Any, Any]:
    """Move the experts that have rows, each clipped to its own gradient norm.

    Adam (Kingma & Ba 2015, arXiv:1412.6980, algorithm 1) keeps moving a parameter by its momentum
    after its gradient is zero, so an expert without rows keeps its parameters, its moments and
    its step count, bit for bit. One norm over all experts would let the steepest of them
    shorten the steps of the others; hence one per expert.

    Args:
      hyper: learning rate and greatest gradient norm.
      params, state, grads: trees with leaves `[E, …]`.
      rows: int32 `[E]`, rows of each expert in this minibatch.
    """
    _, moved = jax.vmap(_adam(hyper.max_grad_norm).update)(grads, state)
    moved = _where_rows(rows, moved, state)
    # Parameters follow from the moments that are kept, not from the old ones and the gradient:
    # else XLA:CPU copies all moments, to have the old ones when it has written the new.
    return _where_rows(rows, _followed(params, moved, lr=hyper.lr), params), moved


def decay_unused(
    param: jax.Array,
    moments: tuple[jax.Array, jax.Array],
    *,
    taken: jax.Array,
    steps: jax.Array,
    most: int,
    lr: jax.Array,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Return a parameter and Adam's two moments after several steps with gradients of zero.

    In step k of them, counted from 1, the moments are β₁ᵏm and β₂ᵏv, so the moves can be summed up
    in one pass over the parameter for each step and none over the moments (Kingma & Ba 2015,
    algorithm 1, with g = 0).

    Args:
      param, moments: f32 `[E, …]`.
      taken: int32 `[E]`, steps that each expert has taken before.
      steps: int32 `[E]`, steps that each expert takes now, none above `most`.
      most: bound of `steps`.
      lr: f32 scalar, or `[E]`.
    """
    first, second = moments
    root = jnp.sqrt(second)

    def of_expert(numbers: jax.Array) -> jax.Array:
        return numbers.reshape(-1, *[1] * (param.ndim - 1))

    def move(k: jax.Array, param: jax.Array) -> jax.Array:
        step = taken + k + 1
        weight = jnp.where(k < steps, _BETA_1 ** (k + 1) / (1 - _BETA_1**step), 0.0)
        shrunk = jnp.sqrt(_BETA_2 ** (k + 1) / (1 - _BETA_2**step))
        rate = of_expert(jnp.asarray(lr)) * of_expert(weight)
        return param - rate * first / (of_expert(shrunk) * root + _EPSILON)

    moved = jax.lax.fori_loop(0, most, move, param, unroll=_UNROLLED)
    return moved, (first * of_expert(_BETA_1**steps), second * of_expert(_BETA_2**steps))


def _followed(params: Any, state: Any, *, lr: jax.Array) -> Any:
    """Parameters moved by the moments; not finite where an expert has taken no step yet."""
    adam = state[1]

    def move(param: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
        step, rate = (
            jnp.reshape(numbers, (-1, *[1] * (param.ndim - 1))) for numbers in (adam.count, lr)
        )
        mean, square = first / (1 - _BETA_1**step), second / (1 - _BETA_2**step)
        return param - rate * mean / (jnp.sqrt(square) + _EPSILON)

    return jax.tree.map(move, params, adam.mu, adam.nu)


def _adam(max_grad_norm: Any) -> Any:
    import optax  # only who traces needs it

    def clipped(grads: Any, _: Any) -> Any:
        # Of the norm first: XLA:CPU rounds a gradient that is divided and multiplied otherwise.
        excess = optax.tree.norm(grads) / max_grad_norm
        return jax.tree.map(lambda grad: jnp.where(excess < 1, grad, grad / excess), grads)

    return optax.chain(
        optax.stateless(clipped), optax.scale_by_adam(b1=_BETA_1, b2=_BETA_2, eps=_EPSILON)
    )


def _where_rows(rows: jax.Array, new: Any, old: Any) -> Any:
    def choose(fresh: jax.Array, stale: jax.Array) -> jax.Array:
        acted = (rows > 0).reshape(-1, *[1] * (fresh.ndim - 1))
        return jnp.where(acted, fresh, stale)

    return jax.tree.map(choose, new, old)
