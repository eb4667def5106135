"""Worlds of flowrl: two tiny ones whose best play is known, and games, one for each agent."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from flowrl.errors import ConfigError
from flowrl.games.base import find_game
from flowrl.multiagent.world import Sizes

TURNS = 8  # of an episode in which signs are matched
CELLS = 7  # of the row in which agents look for the apple
SCALE = 8  # of distances; a power of two, by which every program divides alike
LIMIT = 2 * CELLS  # turns after which an apple rots
POOL = 16  # worlds in which games begin: generating one takes as long as hundreds of turns
POOL_SEED = 0


class Signs(NamedTuple):
    """State of `MatchTheSign`."""

    sign: jax.Array  # int32[A]
    turn: jax.Array  # int32


class MatchTheSign:
    """Every agent sees a sign and is to name it, for a reward of 1; nobody else matters.

    Agent i sees one of 2 + i mod 3 signs, drawn anew in every turn, and has as many actions. The
    best return of an episode is TURNS for each agent.
    """

    def __init__(self, name: str, agents: int) -> None:
        self.name = name
        self._signs = tuple(2 + agent % 3 for agent in range(agents))
        self.sizes = Sizes(self._signs, self._signs)

    def reset(self, key: jax.Array) -> Signs:
        """No turn has begun, and so no sign is shown."""
        return Signs(jnp.full(len(self._signs), -1, jnp.int32), jnp.int32(0))

    def move_others(self, state: Signs, key: jax.Array) -> Signs:
        """Show each agent a new sign."""
        draw = jax.random.uniform(key, (len(self._signs),)) * jnp.array(self._signs)
        return Signs(draw.astype(jnp.int32), state.turn + 1)

    def observe(self, state: Signs) -> jax.Array:
        """f32 `[A, O]`: 1 in the place of the sign."""
        return jax.nn.one_hot(state.sign, max(self._signs))

    def step(
        self, state: Signs, actions: jax.Array, key: jax.Array
    ) -> tuple[Signs, jax.Array, jax.Array]:
        """A reward for each action, int32 `[A]`, that is the sign."""
        return state, (actions == state.sign).astype(jnp.float32), self.is_done(state)

    def act(
        self, state: Signs, agent: jax.Array, action: jax.Array, key: jax.Array
    ) -> tuple[Signs, jax.Array]:
        """The same for one agent."""
        return state, jnp.zeros(len(self._signs)).at[agent].set(action == state.sign[agent])

    def is_done(self, state: Signs) -> jax.Array:
        """Return whether TURNS turns are over."""
        return state.turn >= TURNS


class Orchard(NamedTuple):
    """State of `OnlyApple`."""

    cell: jax.Array  # int32[A], where each agent stands
    apple: jax.Array  # int32, the apple's cell; -1 if there is none
    turn: jax.Array  # int32


class OnlyApple:
    """An apple falls on one of CELLS cells in a row; the agent that is there first eats it.

    In each turn an agent stays, steps left or steps right. The apple is worth 1 and ends the
    episode. Agents that come to it in the same turn share it if they act at once; if they act one
    after another, the first takes it, and the others see that it is gone. The best play is to walk
    straight to it: the episode lasts as many turns as the nearest agent needs, at least one.
    """

    def __init__(self, name: str, agents: int) -> None:
        self.name = name
        self._agents = agents
        self.sizes = Sizes((1 + agents,) * agents, (3,) * agents)

    def reset(self, key: jax.Array) -> Orchard:
        """The agents stand anywhere, and the apple still hangs in the tree."""
        cell = jax.random.randint(key, (self._agents,), 0, CELLS)
        return Orchard(cell, jnp.int32(-1), jnp.int32(0))

    def move_others(self, state: Orchard, key: jax.Array) -> Orchard:
        """The apple falls in the first turn."""
        fallen = jnp.where(state.turn == 0, jax.random.randint(key, (), 0, CELLS), state.apple)
        return state._replace(apple=fallen, turn=state.turn + 1)

    def observe(self, state: Orchard) -> jax.Array:
        """f32 `[A, 1 + A]`: whether there is an apple, how far it is, and the other agents."""
        there = (state.apple >= 0).astype(jnp.float32)
        far = there * (state.apple - state.cell)
        others = state.cell[None] - state.cell[:, None]
        order = (jnp.arange(self._agents)[:, None] + jnp.arange(1, self._agents)) % self._agents
        others = jnp.take_along_axis(others, order, axis=1)
        there = jnp.broadcast_to(there, (self._agents, 1))
        return jnp.concatenate([there, far[:, None] / SCALE, others / SCALE], axis=1)

    def step(
        self, state: Orchard, actions: jax.Array, key: jax.Array
    ) -> tuple[Orchard, jax.Array, jax.Array]:
        """All agents step at once, `actions` int32 `[A]`, and share the apple."""
        state, eats = _walked(state, actions, jnp.ones(self._agents, bool))
        return state, eats / jnp.maximum(eats.sum(), 1), self.is_done(state)

    def act(
        self, state: Orchard, agent: jax.Array, action: jax.Array, key: jax.Array
    ) -> tuple[Orchard, jax.Array]:
        """One agent steps, and has the apple alone."""
        state, eats = _walked(state, action, jnp.arange(self._agents) == agent)
        return state, eats.astype(jnp.float32)

    def is_done(self, state: Orchard) -> jax.Array:
        """Return whether the apple is eaten or rotten."""
        return (state.apple < 0) | (state.turn >= LIMIT)


def _walked(state: Orchard, actions: jax.Array, walks: jax.Array) -> tuple[Orchard, jax.Array]:
    """The state after steps of the agents that walk, bool `[A]`, and which of them eat."""
    aim = state.cell + jnp.array([0, -1, 1])[actions]
    cell = jnp.where(walks, jnp.clip(aim, 0, CELLS - 1), state.cell)
    eats = walks & (cell == state.apple)
    return Orchard(cell, jnp.where(eats.any(), -1, state.apple), state.turn), eats


class GameWorld:
    """Agents that never meet: each plays a game of its own for the game's reward.

    An agent that has died or won begins again in one of POOL worlds, drawn at random; they are the
    same in every run. There is no other end of an episode.
    """

    def __init__(self, name: str, agents: int) -> None:
        self.name = name
        game = find_game(name)
        if isinstance(game.observation_size, tuple):
            what = f"--world {name}: its observations are grids, and agents of a world see numbers"
            raise ConfigError(f"{what}; make them rows of numbers, or train it by flowrl train")
        self._engine, self._agents = game.make(), agents
        self.sizes = Sizes((game.observation_size,) * agents, (game.num_actions,) * agents)
        keys = jax.random.split(jax.random.key(POOL_SEED), POOL)
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
