"""Acting: T steps of B environments, each by the expert whose turn it is."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from flowrl.config import PPOConfig
from flowrl.envs.interface import StepOutput, WalkingEnv
from flowrl.models import dispatch
from flowrl.models.dispatch import Packed


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


def rollout(
    env: WalkingEnv, config: PPOConfig, *, packed: Packed, place: Place
) -> tuple[Place, Step, jax.Array]:
    """Act for `num_steps` steps.

    Returns:
      The place after them, the steps `[T, B, …]`, and the critic's values f32 `[B]` after them.
    """

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
    return place, steps, last_value
