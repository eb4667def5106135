"""Games of one player for several agents, each in a world of its own; a leaf behind `World`."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from flowrl.games.base import find_game
from flowrl.multiagent.world import Sizes

POOL = 16  # worlds in which episodes begin: generating one takes as long as hundreds of turns
_SEED = 0


class GameWorld:
    """Agents that never meet: each plays a game of its own for the game's reward.

    An agent that has died or won begins again in one of POOL worlds, drawn at random; they are the
    same in every run. There is no other end of an episode.
    """

    def __init__(self, name: str, agents: int) -> None:
        self.name = name
        game = find_game(name)
        self._engine, self._agents = game.make(), agents
        self.sizes = Sizes((game.observation_size,) * agents, (game.num_actions,) * agents)
        keys = jax.random.split(jax.random.key(_SEED), POOL)
        self._pool = jax.jit(jax.vmap(self._engine.reset))(keys)

    def reset(self, key: jax.Array) -> Any:
        """A game of each agent, leaves `[A, …]`."""
        drawn = jax.random.randint(key, (self._agents,), 0, POOL)
        return jax.tree.map(lambda leaf: leaf[drawn], self._pool)

    def observe(self, state: Any) -> jax.Array:
        """f32 `[A, O]`."""
        return jax.vmap(self._engine.observe)(state)

    def step(
        self, state: Any, actions: jax.Array, key: jax.Array
    ) -> tuple[Any, jax.Array, jax.Array]:
        """All agents act, `actions` int32 `[A]`; done is bool `[A]`."""
        step_key, reset_key = jax.random.split(key)
        keys = jax.random.split(step_key, self._agents)
        after, reward = jax.vmap(self._engine.step)(keys, state, actions)
        done = jax.vmap(self._engine.is_over)(after)
        pick = jax.vmap(lambda done, new, old: jax.tree.map(partial(jnp.where, done), new, old))
        return pick(done, self.reset(reset_key), after), jnp.float32(reward), done
