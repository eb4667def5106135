"""Environments of one step or a few, whose values and best actions are known."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from flowrl.envs.base import StepOutput


class State(NamedTuple):
    task: jax.Array
    expert: jax.Array
    length: jax.Array
    success: jax.Array
    total: jax.Array
    sight: jax.Array


class TinyEnv:
    """Task k lasts `lengths[k]` steps, then task k + 1 begins; the last one ends the episode.

    Subclasses say what a step earns and what is seen.
    """

    observation_size = 2
    num_actions = 2
    lengths: tuple[int, ...] = (1,)
    experts: tuple[int, ...] = (0,)
    num_experts = 1

    @property
    def num_tasks(self) -> int:
        return len(self.lengths)

    def earned(self, state: State, action: jax.Array) -> jax.Array:
        raise NotImplementedError

    def look(self, key: jax.Array, state: State) -> jax.Array:
        """What is seen next, `[B]`; 0 unless a subclass says otherwise."""
        return jnp.zeros(state.length.shape)

    def succeeded(self, state: State, action: jax.Array) -> jax.Array:
        """Nothing succeeds unless a subclass says so: training spends its budget."""
        return jnp.zeros(state.length.shape, bool)

    def on(self, device: jax.Device) -> TinyEnv:
        return self

    def like(self, num_envs: int) -> tuple[Any, Any]:
        return jax.eval_shape(lambda key: self.reset(key, num_envs), jax.random.key(0))

    def reset(self, key: jax.Array, num_envs: int) -> tuple[jax.Array, Any]:
        zeros = jnp.zeros(num_envs, jnp.int32)
        state = State(
            task=zeros,
            expert=zeros + self.experts[0],
            length=zeros,
            success=jnp.zeros((num_envs, self.num_tasks), bool),
            total=jnp.zeros(num_envs),
            sight=jnp.zeros(num_envs),
        )
        state = state._replace(sight=self.look(key, state))
        return self.observe(state), state

    def observe(self, state: State) -> jax.Array:
        return jnp.stack([state.sight, state.length.astype(jnp.float32)], axis=-1)

    def restock(self, key: jax.Array, state: State) -> State:
        return state

    def current_expert(self, state: State) -> jax.Array:
        return state.expert

    def action_of(self, state: State, choice: jax.Array) -> jax.Array:
        return choice

    def potential(self, state: State) -> jax.Array:
        return jnp.zeros(state.length.shape)

    def step(self, key: jax.Array, state: State, actions: jax.Array):
        length = state.length + 1
        ends = jnp.cumsum(jnp.asarray(self.lengths))
        completed = length == ends[state.task]
        done = length == ends[-1]
        reward = self.earned(state, actions).astype(jnp.float32)
        won = completed & self.succeeded(state, actions)
        success = state.success | (
            jax.nn.one_hot(state.task, self.num_tasks, dtype=bool) & won[:, None]
        )
        task = jnp.where(done, 0, state.task + completed)
        output = StepOutput(
            reward=reward,
            done=done,
            boundary=completed,
            truncated=jnp.zeros_like(done),
            task=state.task,
            expert=state.expert,
            next_expert=jnp.asarray(self.experts)[task],
            task_success=success,
            lied=jnp.zeros_like(done),
            explored=jnp.zeros_like(done),
            kept=jnp.zeros((*done.shape, 0), bool),
            cause=jnp.zeros((*done.shape, 0), bool),
            episode_length=length,
            episode_return=state.total + reward,
        )
        state = State(
            task=task,
            expert=output.next_expert,
            length=jnp.where(done, 0, length),
            success=jnp.where(done[:, None], False, success),
            total=jnp.where(done, 0.0, state.total + reward),
            sight=state.sight,
        )
        state = state._replace(sight=self.look(key, state))
        return self.observe(state), state, output


class Constant(TinyEnv):
    """One step, reward 1: the value is 1."""

    def earned(self, state, action):
        return jnp.ones(action.shape)


class Seen(TinyEnv):
    """One step, the reward is the observation (1 or -1): so is the value."""

    def look(self, key, state):
        return jax.random.rademacher(key, state.length.shape, jnp.float32)

    def earned(self, state, action):
        return state.sight


class Delayed(TinyEnv):
    """Two steps, reward 1 at the second: values are gamma and 1."""

    lengths = (2,)

    def earned(self, state, action):
        return state.length == 1


class Chosen(TinyEnv):
    """One step, action 1 earns 1 and succeeds, action 0 earns nothing."""

    def earned(self, state, action):
        return action

    def succeeded(self, state, action):
        return action == 1


class Matched(Seen):
    """One step, the action must match the sign that is seen."""

    def earned(self, state, action):
        return jnp.where(self.succeeded(state, action), 1.0, -1.0)

    def succeeded(self, state, action):
        return action == (state.sight > 0)


class Broken(TinyEnv):
    """One step; the reward is not a number."""

    def earned(self, state, action):
        return jnp.full(action.shape, jnp.nan)


class Relay(TinyEnv):
    """Two tasks of two steps, by experts 2 and 0 of three, which must do the opposite.

    The first task earns 1 per step for action 0, the second 10 for action 1. A return that ran
    on into the second task would give expert 2 values near 20, not 1 + gamma and 1.
    """

    lengths = (2, 2)
    experts = (2, 0)
    num_experts = 3

    def earned(self, state, action):
        return jnp.where(state.task == 0, action == 0, 10.0 * (action == 1))


class Liar(Relay):
    """Every task is done when its time is up, and its gains are never there."""

    def succeeded(self, state, action):
        return jnp.ones(action.shape, bool)

    def step(self, key, state, actions):
        obs, state, output = super().step(key, state, actions)
        return obs, state, output._replace(lied=output.boundary)


class Procession(TinyEnv):
    """64 tasks of one step, by an expert each; those with odd numbers must do the opposite."""

    lengths = (1,) * 64
    experts = tuple(range(64))
    num_experts = 64

    def earned(self, state, action):
        return action == state.expert % 2


class Steady(Matched):
    """One step, as `Matched`; the expert of an environment is always the one it began with."""

    num_experts = 2

    def step(self, key, state, actions):
        obs, after, output = super().step(key, state, actions)
        same = state.expert
        return obs, after._replace(expert=same), output._replace(expert=same, next_expert=same)


class Crowd(TinyEnv):
    """Sixteen steps, shared by the experts, an action that must match the parity of a number.

    The column with that number is seen in the first eight steps, and then a quarter of all.
    """

    def __init__(self, num_experts: int, columns: int = 160) -> None:
        self.num_experts, self.observation_size = num_experts, columns
        self.experts = tuple(range(num_experts))
        each = 16 // num_experts
        self.lengths = (each,) * (num_experts - 1) + (16 - each * (num_experts - 1),)

    def look(self, key, state):
        shape, columns = state.length.shape, self.observation_size
        return jax.random.randint(key, shape, 0, columns).astype(jnp.float32)

    def observe(self, state):
        columns = self.observation_size
        distance = (jnp.arange(columns) - state.sight[:, None]) % columns
        seen = jnp.where(state.length < 8, 1, columns // 4)
        return (distance < seen[:, None]).astype(jnp.float32)

    def earned(self, state, action):
        return action == state.sight.astype(jnp.int32) % 2
