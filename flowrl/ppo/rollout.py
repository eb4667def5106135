"""Acting: T steps of B environments, each by the expert whose turn it is."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from flowrl.config import PPOConfig
from flowrl.envs.base import StepOutput, WalkingEnv
from flowrl.networks import dispatch
from flowrl.networks.dispatch import Packed


class Place(NamedTuple):
    """Where acting goes on."""

    env: Any  # the environments' state
    obs: jax.Array  # f32[B, observation]
    key: jax.Array


class Step(NamedTuple):
    """One step as it was taken; leaves `[T, B, …]` after a rollout."""

    obs: jax.Array
    action: jax.Array
    log_prob: jax.Array
    value: jax.Array
    output: StepOutput


class Acted(NamedTuple):
    """What a rollout hands to the learner."""

    steps: Step  # leaves [T, B, …]
    last_value: jax.Array  # f32[B], the critic's values after the last step
    shuffle_key: jax.Array


def rollout(
    env: WalkingEnv, config: PPOConfig, packed: Packed, place: Place
) -> tuple[Place, Acted]:
    """Act for `num_steps` steps; answers where acting goes on, and what there is to learn from."""

    def act(place: Place, _: None) -> tuple[Place, Step]:
        key, action_key, step_key = jax.random.split(place.key, 3)
        expert = env.current_expert(place.env)
        logits, value = dispatch.apply_packed(
            packed, place.obs, expert, activation=config.activation
        )
        action = jax.random.categorical(action_key, logits).astype(jnp.int32)
        log_prob = jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], -1)[:, 0]
        obs, state, output = env.step(step_key, place.env, action)
        return Place(state, obs, key), Step(place.obs, action, log_prob, value, output)

    place, steps = jax.lax.scan(act, place, None, length=config.num_steps)
    expert = env.current_expert(place.env)
    _, last_value = dispatch.apply_packed(packed, place.obs, expert, activation=config.activation)
    key, shuffle_key = jax.random.split(place.key)
    return place._replace(key=key), Acted(steps, last_value, shuffle_key)
