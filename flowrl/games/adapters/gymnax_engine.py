"""The engine of games of gymnax; a leaf, alone because it imports JAX and gymnax."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import gymnax
import jax
import jax.numpy as jnp
import numpy as np

from flowrl.errors import ConfigError
from flowrl.games.base import WorldStep
from flowrl.games.random_play import settle

_FIELD = 16  # pixels of a cell, each way
_HUES = np.array(
    [[90, 160, 250], [250, 200, 60], [120, 220, 130], [230, 110, 110], [190, 140, 240]]
)


class GymnaxWorld(NamedTuple):
    """One episode of an environment."""

    state: Any
    """As the environment has it."""
    observation: jax.Array
    """f32, as it came with the state: some environments return it from a step alone."""
    over: jax.Array
    """bool[]"""
    score: jax.Array
    """f32[]: sum of the rewards."""


class GymnaxEngine:
    """An `Engine` of one environment; its time limit does not count, since skills have theirs."""

    def __init__(
        self,
        environment: str | Callable[[], Any],
        features: Mapping[str, Callable[[Any], Any]],
        num_actions: int,
    ) -> None:
        made = gymnax.make(environment) if isinstance(environment, str) else environment()
        pair = made if isinstance(made, tuple) else (made, made.default_params)
        self._environment, self._params = pair
        self._features = dict(features)
        space = self._environment.action_space(self._params)
        if not hasattr(space, "n"):
            what = f"the actions of {self._environment.name} are a {type(space).__name__}"
            raise ConfigError(f"{what}, and experts choose one of N; cut them into levels")
        if space.n != num_actions:
            what = f"{self._environment.name} has {space.n} actions"
            raise ConfigError(f"{what}, and num_actions says {num_actions}")

    def reset(self, key: jax.Array) -> GymnaxWorld:
        """A new episode."""
        seen, state = self._environment.reset_env(key, self._params)
        return GymnaxWorld(state, _numbers(seen), jnp.zeros((), bool), jnp.zeros(()))

    def step(
        self, key: jax.Array, world: GymnaxWorld, action: jax.Array
    ) -> tuple[GymnaxWorld, jax.Array]:
        """The episode after an action, int32[], and its reward."""
        stepped = self._environment.step_env(key, world.state, action, self._params)
        seen, state, reward, over = stepped[:4]
        kinds = map(
            jnp.result_type, jax.tree.leaves(world.state)
        )  # a reset's int may become a float
        leaves, tree = jax.tree.flatten(state)
        state = jax.tree.unflatten(tree, map(jnp.asarray, leaves, kinds))
        reward = jnp.asarray(reward, jnp.float32)
        over = jnp.asarray(over, bool)
        return GymnaxWorld(state, _numbers(seen), over, world.score + reward), reward

    def observe(self, world: GymnaxWorld) -> jax.Array:
        """f32[observation_size]; a grid without channels gets one."""
        return world.observation

    def is_over(self, world: GymnaxWorld) -> jax.Array:
        """bool[]: the environment says that its episode has ended."""
        return world.over

    def features(self, names: Iterable[str], step: WorldStep) -> dict[str, Any]:
        """The named features."""
        return {name: self._feature(name, step) for name in names}

    def _feature(self, name: str, step: WorldStep) -> jax.Array:
        known = {
            "score": step.after.score,
            "reward": jnp.asarray(step.env_reward, jnp.float32),
            "alive": ~step.after.over,
            "timestep": jnp.asarray(step.timestep, jnp.int32),
        }
        if name in known:
            return known[name]
        now = self._of_state(name.removesuffix("_diff"), step.after.state)
        if name in self._features:
            return now
        return now - self._of_state(name.removesuffix("_diff"), step.before.state)

    def _of_state(self, name: str, state: Any) -> jax.Array:
        value = jnp.asarray(self._features[name](settle(state)))
        return value.astype(jnp.float32 if jnp.issubdtype(value.dtype, jnp.floating) else jnp.int32)


def _numbers(seen: Any) -> jax.Array:
    numbers = jnp.asarray(seen, jnp.float32)
    return numbers[..., None] if numbers.ndim == 2 else numbers


def draw(world: GymnaxWorld) -> np.ndarray:
    """A picture of a grid, uint8 `[H, W, 3]`, with a colour for each channel."""
    cells = np.asarray(world.observation)
    hues = _HUES[np.arange(cells.shape[2]) % len(_HUES)]
    picture = np.clip(cells, 0, 1)[..., None] * hues
    return picture.max(axis=2).astype(np.uint8).repeat(_FIELD, axis=0).repeat(_FIELD, axis=1)
