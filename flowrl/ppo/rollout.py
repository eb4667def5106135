"""Acting: T steps of B environments, each by the expert whose turn it is.

A step of the game is a few thousand small operations, which XLA:CPU runs one after another however
many CPUs there are. So the environments are split into groups with keys, worlds and a state of
their own. All groups are stepped by the same program, each in a thread. A group costs as much again
as some twenty environments, whatever its size, so groups should not be small.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from flowrl.config import PPOConfig, threads_for
from flowrl.envs.base import StepOutput, WalkingEnv
from flowrl.networks import dispatch
from flowrl.networks.grouped import Packed


class RolloutState(NamedTuple):
    """Where acting goes on."""

    env: Any  # the environments' state
    obs: jax.Array  # f32[B, observation]
    key: jax.Array


class Timestep(NamedTuple):
    """One step as it was taken; leaves `[T, B, …]` after a rollout."""

    obs: jax.Array
    action: jax.Array
    log_prob: jax.Array
    value: jax.Array
    output: StepOutput


class RolloutBatch(NamedTuple):
    """What a rollout hands to the learner."""

    steps: Timestep  # leaves [T, B, …]
    last_value: jax.Array  # f32[B], the critic's values after the last step
    shuffle_key: jax.Array


def rollout(
    env: WalkingEnv, config: PPOConfig, packed: Packed, state: RolloutState
) -> tuple[RolloutState, RolloutBatch]:
    """Act for T = `num_steps` steps in B environments; returns the next state and the steps.

    Args:
      packed: experts, leaves `[E, …]`.
      state: where acting goes on, `obs` f32 `[B, observation]`.
    """

    def act(state: RolloutState, _: None) -> tuple[RolloutState, Timestep]:
        key, action_key, step_key = jax.random.split(state.key, 3)
        expert = env.current_expert(state.env)
        logits, value = dispatch.apply(packed, state.obs, expert, activation=config.activation)
        action = jax.random.categorical(action_key, logits).astype(jnp.int32)
        log_prob = jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], -1)[:, 0]
        obs, env_state, output = env.step(step_key, state.env, action)
        step = Timestep(state.obs, action, log_prob, value, output)
        return RolloutState(env_state, obs, key), step

    state, steps = jax.lax.scan(act, state, None, length=config.num_steps)
    expert = env.current_expert(state.env)
    _, last_value = dispatch.apply(packed, state.obs, expert, activation=config.activation)
    key, shuffle_key = jax.random.split(state.key)
    return state._replace(key=key), RolloutBatch(steps, last_value, shuffle_key)


def merge_groups(groups: Sequence[RolloutBatch]) -> RolloutBatch:
    """The rollouts of several groups, leaves `[T, B, …]`, as one with the groups side by side."""
    steps = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *(g.steps for g in groups))
    last_value = jnp.concatenate([group.last_value for group in groups])
    return RolloutBatch(steps, last_value, groups[0].shuffle_key)


def with_threads(config: PPOConfig) -> PPOConfig:
    """The configuration with a number of threads: the machine's choice if the user made none."""
    if config.acting_threads is not None:
        return config
    on_cpu = jax.default_backend() == "cpu"  # a GPU steps all at once
    cpus = len(os.sched_getaffinity(0)) if on_cpu else 1
    return replace(config, acting_threads=threads_for(config.num_envs, cpus))


def num_groups(config: PPOConfig) -> int:
    """Groups of environments, and threads that step them."""
    return config.acting_threads or 1


def group_size(config: PPOConfig) -> int:
    """Environments of one group."""
    return config.num_envs // num_groups(config)
