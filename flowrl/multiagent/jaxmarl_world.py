"""Worlds of JaxMARL, which is optional: the extra `marl`."""

from __future__ import annotations

import io
import math
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from flowrl.multiagent.world import Sizes

# JaxMARL prints as it is imported, and puts the process's first streams in the place of ours.
_quiet = io.StringIO()
_streams = {name: getattr(sys, name) for name in ("stdout", "stderr", "__stdout__")}
try:
    for _name in ("stdout", "__stdout__"):
        setattr(sys, _name, _quiet)
    import jaxmarl  # pyright: ignore[reportMissingImports]
finally:
    for _name, _stream in _streams.items():
        setattr(sys, _name, _stream)

# Options by which a world takes as many agents as one likes; the others have their own number.
_NUMBERS = {"MPE_simple_spread_v3": ("num_agents", "num_landmarks"), "hanabi": ("num_agents",)}
# Functions that tell which actions are allowed; in the other worlds all always are.
_ALLOWED = {
    "SMAX": "get_avail_actions",
    "HeuristicEnemySMAX": "get_avail_actions",
    "hanabi": "get_legal_moves",
}


class Seen(NamedTuple):
    """A world's state with its observations, which some worlds return from a step alone."""

    env: Any
    obs: jax.Array  # f32[A, O]


class JaxMARLWorld:
    """A world whose agents all act at once.

    An action that is not allowed counts as the first that is. The world is over when it is for all
    agents: one that is out earlier acts without effect, and still earns what its team does.
    """

    def __init__(self, name: str, agents: int) -> None:
        self.name = name
        self._env: Any = jaxmarl.make(name, **dict.fromkeys(_NUMBERS.get(name, ()), agents))
        env = self._env
        obs, _ = jax.eval_shape(env.reset, jax.eval_shape(jax.random.key, 0))
        self.sizes = Sizes(
            tuple(math.prod(obs[agent].shape) for agent in env.agents),
            tuple(int(env.action_space(agent).n) for agent in env.agents),
        )

    def reset(self, key: jax.Array) -> Seen:
        """A new world."""
        obs, env = self._env.reset(key)
        return Seen(env, self._padded(obs))

    def observe(self, state: Seen) -> jax.Array:
        """f32 `[A, O]`, each agent's observation flat and padded with 0."""
        return state.obs

    def step(
        self, state: Seen, actions: jax.Array, key: jax.Array
    ) -> tuple[Seen, jax.Array, jax.Array]:
        """All agents act at once, `actions` int32 `[A]`."""
        taken = dict(zip(self._env.agents, actions, strict=True))
        if self.name in _ALLOWED:
            allowed = getattr(self._env, _ALLOWED[self.name])(state.env)
            taken = {it: _allowed(action, allowed[it]) for it, action in taken.items()}
        obs, env, rewards, dones, _ = self._env.step_env(key, state.env, taken)
        reward = jnp.stack([jnp.float32(rewards[agent]) for agent in self._env.agents])
        return Seen(env, self._padded(obs)), reward, dones["__all__"]

    def _padded(self, obs: dict[str, jax.Array]) -> jax.Array:
        wide = max(self.sizes.observations)
        rows = [jnp.float32(obs[agent]).ravel() for agent in self._env.agents]
        return jnp.stack([jnp.pad(row, (0, wide - row.size)) for row in rows])


def _allowed(action: jax.Array, allowed: jax.Array) -> jax.Array:
    """The action, or the first of those that are allowed, bool or number `[actions]`."""
    return jnp.where(allowed[action] > 0, action, jnp.argmax(allowed > 0))
