"""Generalised advantage estimation over rows of several experts; a leaf of pure functions."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from flowrl.ppo.sharding import ONE_DEVICE, Axis


def advantages(
    rewards: jax.Array,
    values: jax.Array,
    *,
    boundaries: jax.Array,
    last_value: jax.Array,
    gamma: float | jax.Array,
    lam: float | jax.Array,
) -> jax.Array:
    """Generalised advantage estimates, cut wherever one expert's task ends.

    Schulman et al. 2016 (arXiv:1506.02438), equation 16, as the recursion
    A_t = δ_t + γλ·c_t·A_{t+1}, δ_t = r_t + γ·c_t·V_{t+1} - V_t, where c_t is 0 at a boundary and 1
    elsewhere: what the next task earns is not this expert's, and neither is the next episode's.
    The time limit is a boundary too, so "not done in time" is worth nothing more.

    Args:
      rewards, values: f32 `[T, B]`, T steps of B environments.
      boundaries: bool `[T, B]`, the task or the episode ended with this step.
      last_value: f32 `[B]`, the critic's value after step T.
      gamma, lam: γ and λ.

    Returns f32 `[T, B]`, in units of reward; add `values` for the returns.
    """
    goes_on = 1.0 - boundaries.astype(values.dtype)
    next_values = jnp.concatenate([values[1:], last_value[None]])
    deltas = rewards + gamma * goes_on * next_values - values

    def earlier(later: jax.Array, step: tuple[jax.Array, jax.Array]):
        delta, keep = step
        advantage = delta + gamma * lam * keep * later
        return advantage, advantage

    _, advantages = jax.lax.scan(
        earlier, jnp.zeros_like(last_value), (deltas, goes_on), reverse=True
    )
    return advantages


def normalised(
    advantage: jax.Array, expert: jax.Array, *, num_experts: int, axis: Axis = ONE_DEVICE
) -> jax.Array:
    """Advantages f32 `[T, B]` with mean 0 and deviation 1 among the rows of each expert.

    `expert` int32 `[T, B]` says whose row is whose; the rows of all devices of `axis` count.

    Experts earn rewards of different scales, so one mean over all of them would turn the
    difference between tasks into a reason to like or dislike actions. Taken once over the whole
    rollout, where an expert has rows enough, rather than per minibatch. An expert with one row
    gets 0 there: nothing is known to compare it with.
    """
    flat, owner = advantage.ravel(), expert.ravel()
    counts = axis.total(jnp.bincount(owner, length=num_experts))
    rows = jnp.maximum(counts, 1).astype(flat.dtype)
    centred = flat - (axis.total(jax.ops.segment_sum(flat, owner, num_experts)) / rows)[owner]
    variance = axis.total(jax.ops.segment_sum(centred**2, owner, num_experts)) / rows
    return (centred / (jnp.sqrt(variance)[owner] + 1e-8)).reshape(advantage.shape)
