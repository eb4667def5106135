"""Environments as Craftax's users wrap them today: one with its log, many with optimistic resets.

The tasks are flowrl's: the functions of a plan's skills decide success and reward,
so that both sides do the same work. All else is Craftax as shipped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from craftax.craftax_env import make_craftax_env_from_name

from flowrl.config import PPOConfig
from flowrl.envs.skill_module import TaskModule
from flowrl.envs.tasks import features_of, settle
from flowrl.games.base import WorldStep

RESET_RATIO = 16  # environments that share one new world per step
SUCCESS_BONUS = 1.0


class Single(Protocol):
    """One environment; its info tree says with `boundary` where an expert's task ends."""

    observation_size: int
    num_actions: int
    num_experts: int

    def reset(self, key: jax.Array) -> tuple[jax.Array, Any]: ...

    def step(self, key: jax.Array, state: Any, action: jax.Array) -> tuple[Any, ...]: ...

    def current_expert(self, state: Any) -> jax.Array: ...


class TaskState(NamedTuple):
    """A world, and how far its episode has come in the plan."""

    world: Any
    task: jax.Array
    task_length: jax.Array


class TaskEnv:
    """One environment that walks a module's plan, with Craftax's own step, reset and info tree."""

    def __init__(self, module: TaskModule, config: PPOConfig) -> None:
        self.craftax: Any = make_craftax_env_from_name(config.env_name, auto_reset=False)
        self.params = self.craftax.default_params
        self.observation_size = self.craftax.observation_space(self.params).shape[0]
        self.num_actions = self.craftax.num_actions
        self.num_experts = len(module.experts)
        self._tasks = module.tasks
        self._engine = module.game.make()
        self._limits = jnp.array([task.max_steps or config.max_task_steps for task in module.tasks])
        self._experts = jnp.array([task.expert_local for task in module.tasks])

    def reset(self, key: jax.Array) -> tuple[jax.Array, TaskState]:
        obs, world = self.craftax.reset_env(key, self.params)
        return obs, TaskState(settle(world), jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))

    def step(self, key: jax.Array, state: TaskState, action: jax.Array):
        obs, world, reward, over, info = self.craftax.step_env(
            key, state.world, action, self.params
        )
        change = WorldStep(state.world, world, jnp.asarray(reward, jnp.float32))
        completed, reward = self._success_and_reward(state.task, change)
        success = completed & (state.task == len(self._tasks) - 1)
        length = jnp.where(completed, 0, state.task_length + 1)
        done = over | success | (length >= self._limits[state.task])
        info["boundary"] = done | completed
        info["success"] = success
        task = jnp.minimum(state.task + completed, len(self._tasks) - 1).astype(jnp.int32)
        return obs, TaskState(settle(world), task, length), reward, done, info

    def current_expert(self, state: TaskState) -> jax.Array:
        return self._experts[state.task]

    def _success_and_reward(
        self, task: jax.Array, change: WorldStep
    ) -> tuple[jax.Array, jax.Array]:
        pairs = [known.functions for known in self._tasks]
        called = [f for pair in pairs for f in (pair.is_done, pair.reward)]
        features = self._engine.features((name for f in called for name in features_of(f)), change)

        def call(function: Callable[..., Any]) -> Any:
            return function(**{name: features[name] for name in features_of(function)})

        completed = jnp.stack([jnp.asarray(call(pair.is_done), bool) for pair in pairs])
        rewards = [jnp.asarray(call(pair.reward), jnp.float32) for pair in pairs]
        return completed[task], jnp.stack(rewards)[task] + SUCCESS_BONUS * completed[task]


class LogState(NamedTuple):
    """An environment's state, with the return and length of its episode and of the last one."""

    env: Any
    episode_return: jax.Array
    episode_length: jax.Array
    returned_return: jax.Array
    returned_length: jax.Array
    timestep: jax.Array


class LogEnv:
    """Adds returns and lengths of episodes to the info tree."""

    def __init__(self, env: Single) -> None:
        self.env = env

    def reset(self, key: jax.Array) -> tuple[jax.Array, LogState]:
        obs, state = self.env.reset(key)
        nothing, none = jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32)
        return obs, LogState(state, nothing, none, nothing, none, none)

    def step(self, key: jax.Array, state: LogState, action: jax.Array):
        obs, inner, reward, done, info = self.env.step(key, state.env, action)
        total, length = state.episode_return + reward, state.episode_length + 1
        state = LogState(
            env=inner,
            episode_return=jnp.where(done, 0.0, total),
            episode_length=jnp.where(done, 0, length),
            returned_return=jnp.where(done, total, state.returned_return),
            returned_length=jnp.where(done, length, state.returned_length),
            timestep=state.timestep + 1,
        )
        info["returned_episode_returns"] = state.returned_return
        info["returned_episode_lengths"] = state.returned_length
        info["timestep"] = state.timestep
        info["returned_episode"] = done
        return obs, state, reward, done, info

    def current_expert(self, state: LogState) -> jax.Array:
        return self.env.current_expert(state.env)


class OptimisticResets:
    """B environments in step, of which B / ratio get a new world each at most.

    So many worlds are made in every step, needed or not; should more episodes end at once, some
    begin in the same world.
    """

    def __init__(self, env: LogEnv, *, num_envs: int) -> None:
        ratio = min(RESET_RATIO, num_envs)
        if num_envs % ratio:
            raise ValueError(f"{num_envs} environments cannot be divided by {ratio}")
        self.env = env
        self.num_envs = num_envs
        self.num_resets = num_envs // ratio
        self._sharing = jnp.arange(self.num_resets).repeat(ratio)

    def reset(self, key: jax.Array) -> tuple[jax.Array, Any]:
        return jax.vmap(self.env.reset)(jax.random.split(key, self.num_envs))

    def step(self, key: jax.Array, state: Any, action: jax.Array):
        step_key, reset_key, choice_key = jax.random.split(key, 3)
        keys = jax.random.split(step_key, self.num_envs)
        obs, state, reward, done, info = jax.vmap(self.env.step)(keys, state, action)
        fresh = jax.vmap(self.env.reset)(jax.random.split(reset_key, self.num_resets))
        everyone = jnp.arange(self.num_envs)
        first = jax.random.choice(
            choice_key, everyone, shape=(self.num_resets,), p=done, replace=False
        )
        given = self._sharing.at[first].set(jnp.arange(self.num_resets))
        fresh = jax.tree.map(lambda leaf: leaf[given], fresh)
        obs, state = jax.vmap(_one_of)(done, fresh, (obs, state))
        return obs, state, reward, done, info

    def current_expert(self, state: Any) -> jax.Array:
        return jax.vmap(self.env.current_expert)(state)


def _one_of(done: jax.Array, fresh: Any, old: Any) -> Any:
    return jax.tree.map(lambda new, left: jax.lax.select(done, new, left), fresh, old)
