"""Acting: T steps of B environments, each by the expert whose turn it is.

A step of the game is a few thousand small operations, which XLA:CPU runs one after another however
many CPUs there are. So the environments are split into shards with keys, worlds and a state of
their own. All shards are stepped by the same program, side by side in threads. A shard costs as
much again as some twenty environments, whatever its size, so shards should not be small.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from flowrl.config import PPOConfig
from flowrl.envs.base import StepOutput
from flowrl.envs.vector import BatchedEnv
from flowrl.networks import dispatch
from flowrl.networks.grouped import Packed, in_precision


class RolloutState(NamedTuple):
    """The state from which acting goes on."""

    env: Any  # the environments' state
    obs: jax.Array  # f32[B, observation]
    key: jax.Array


class Timestep(NamedTuple):
    """One step as it was taken; leaves `[T, B, …]` after a rollout."""

    obs: jax.Array
    action: jax.Array  # as the expert chose it, in the frame of what it saw
    log_prob: jax.Array
    value: jax.Array
    potential: jax.Array
    output: StepOutput


class RolloutBatch(NamedTuple):
    """A rollout for the learner."""

    steps: Timestep  # leaves [T, B, …]
    last_value: jax.Array  # f32[B], values and potentials after the last step
    shuffle_key: jax.Array  # key data, uint32[1, words]


def rollout(
    env: BatchedEnv, config: PPOConfig, packed: Packed, state: RolloutState
) -> tuple[RolloutState, RolloutBatch]:
    """Act for T = `num_steps` steps in B environments; returns the next state and the steps.

    The experts have leaves `[E, …]`; acting goes on from `state`, `obs` f32 `[B, observation]`.
    """
    packed = in_precision(packed, config.precision)

    def act(state: RolloutState, _: None) -> tuple[RolloutState, Timestep]:
        key, action_key, step_key = jax.random.split(state.key, 3)
        expert = env.current_expert(state.env)
        logits, value = dispatch.apply(packed, state.obs, expert, activation=config.activation)
        action = jax.random.categorical(action_key, logits).astype(jnp.int32)
        log_prob = jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], -1)[:, 0]
        taken = env.action_of(state.env, action)
        obs, env_state, output = env.step(step_key, state.env, taken)
        potential = env.potential(state.env)
        step = Timestep(state.obs, action, log_prob, value, potential, output)
        return RolloutState(env_state, obs, key), step

    state, steps = jax.lax.scan(act, state, None, length=config.num_steps)
    expert = env.current_expert(state.env)
    _, last_value = dispatch.apply(packed, state.obs, expert, activation=config.activation)
    last_value = last_value + env.potential(state.env)
    key, shuffle_key = jax.random.split(state.key)
    shuffle = jax.random.key_data(shuffle_key)[None]  # an array that can lie on several devices
    return state._replace(key=key), RolloutBatch(steps, last_value, shuffle)


def merge_shards(shards: Sequence[RolloutBatch]) -> RolloutBatch:
    """The rollouts of several shards, leaves `[T, B, …]`, as one with the shards side by side."""
    steps = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *(g.steps for g in shards))
    last_value = jnp.concatenate([shard.last_value for shard in shards])
    return RolloutBatch(steps, last_value, jnp.concatenate([s.shuffle_key for s in shards]))
