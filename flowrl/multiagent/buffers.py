"""Buffers that agents learn from: arrays that are never written to, only replaced.

A `Rollout` is one epoch of all agents. A `Ring` is the ring buffer of one agent; those of all
agents are one tree of leaves `[A, …]`, over which `vmap` repeats the functions here.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Rollout(NamedTuple):
    """T turns of A agents in B copies of a world; one agent's has no axis A."""

    obs: jax.Array  # f32[A, T, B, O]
    action: jax.Array  # int32[A, T, B]
    log_prob: jax.Array  # f32[A, T, B], of the action when it was taken
    value: jax.Array  # f32[A, T, B], what the agent expected
    reward: jax.Array  # f32[A, T, B]
    done: jax.Array  # bool[A, T, B], the world ended with this turn
    last_value: jax.Array  # f32[A, B], after turn T
    last_obs: jax.Array  # f32[A, B, O], after turn T


class Transitions(NamedTuple):
    """N steps of one agent."""

    obs: jax.Array  # f32[N, O]
    action: jax.Array  # int32[N]
    reward: jax.Array  # f32[N]
    done: jax.Array  # bool[N]
    next_obs: jax.Array  # f32[N, O], of another episode where the step ended one


class Ring(NamedTuple):
    """The last C steps of one agent at most."""

    steps: Transitions  # leaves [C, …]
    position: jax.Array  # int32, the place of the next step
    size: jax.Array  # int32, steps held


def empty_ring(capacity: int, observation_size: int) -> Ring:
    """A ring without steps."""
    obs = jnp.zeros((capacity, observation_size))
    numbers = jnp.zeros(capacity, jnp.int32), jnp.zeros(capacity), jnp.zeros(capacity, bool)
    return Ring(Transitions(obs, *numbers, obs), jnp.int32(0), jnp.int32(0))


def transitions(rollout: Rollout) -> Transitions:
    """The steps of one agent's rollout, N = T × B, turn by turn."""
    next_obs = jnp.concatenate([rollout.obs[1:], rollout.last_obs[None]])
    steps = Transitions(rollout.obs, rollout.action, rollout.reward, rollout.done, next_obs)
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), steps)


def add(ring: Ring, steps: Transitions) -> Ring:
    """Put N steps in the places of the oldest; of more than C steps the last C stay."""
    capacity, number = ring.steps.action.shape[0], steps.action.shape[0]
    kept = min(capacity, number)
    start = ring.position + (number - kept)
    place = (start + jnp.arange(kept, dtype=jnp.int32)) % capacity

    def put(held: jax.Array, new: jax.Array) -> jax.Array:
        return held.at[place].set(new[number - kept :], unique_indices=True)

    return Ring(
        jax.tree.map(put, ring.steps, steps),
        (ring.position + number) % capacity,
        jnp.minimum(ring.size + number, capacity),
    )


def sample(ring: Ring, key: jax.Array, size: int) -> Transitions:
    """Draw `size` of the steps held, each as likely as any other, with replacement."""
    place = jax.random.randint(key, (size,), 0, ring.size)
    return jax.tree.map(lambda leaf: leaf[place], ring.steps)
