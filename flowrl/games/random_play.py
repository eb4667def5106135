"""Timesteps of a player that acts at random; alone, because moments and checks share it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flowrl.games.base import Engine, Game, WorldStep


def settle(tree: Any) -> Any:
    """The same values with settled types, so that reset and step agree and compile once.

    New worlds may hold Python numbers, which jax types weakly; stepped ones do not.
    """
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.result_type(leaf)), tree)


def play(
    engine: Engine, key: Any, *, names: Iterable[str], num_actions: int, steps: int
) -> dict[str, Any]:
    """Everything that an engine returns in one game, by function, leaves `[steps, …]`.

    Where the game is over, it goes on from the world before.
    """
    names = tuple(names)

    def on(world: Any, given: tuple[Any, Any]) -> tuple[Any, dict[str, Any]]:
        key, number = given
        action_key, step_key = jax.random.split(key)
        action = jax.random.randint(action_key, (), 0, num_actions)
        after, reward = engine.step(step_key, world, action)
        after, over = settle(after), engine.is_over(after)
        step = WorldStep(world, after, jnp.asarray(reward, jnp.float32), number, number)
        values = {
            "step": (after, reward),
            "observe": engine.observe(after),
            "is_over": over,
            "features": engine.features(names, step),
        }
        return jax.tree.map(partial(jnp.where, over), world, after), values

    first_key, key = jax.random.split(key)
    given = jax.random.split(key, steps), jnp.arange(1, steps + 1)
    return jax.lax.scan(on, settle(engine.reset(first_key)), given)[1]


def moments_of(game: Game, engine: Engine) -> Mapping[str, Any]:
    """Every feature in M timesteps, leaves `[M, …]`: the engine's moments, or a random player's."""
    if own := getattr(engine, "moments", None):
        return own()
    return random_moments(engine, game.features, num_actions=game.num_actions)


def random_moments(
    engine: Engine, names: Iterable[str], *, num_actions: int, worlds: int = 16, steps: int = 64
) -> dict[str, Any]:
    """Features of a random player's timesteps, leaves `[worlds × steps, …]`.

    They are enough where a random player meets all that skills ask for; else give the engine
    `moments` of its own, which add rows by hand.
    """
    once = partial(play, engine, names=names, num_actions=num_actions, steps=steps)
    features = jax.jit(jax.vmap(lambda key: once(key)["features"]))
    seen = features(jax.random.split(jax.random.key(0), worlds))
    return jax.tree.map(lambda leaf: np.asarray(leaf).reshape(-1, *leaf.shape[2:]), seen)
