"""Write the moments that skill code is tried on: `python scripts/write_moments.py`.

Run it when a feature's meaning or shape changes; `tests/games/test_craftax_engine.py` says when.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flowrl.envs.tasks import settle
from flowrl.games.base import Game, WorldStep
from flowrl.games.craftax import CLASSIC, FULL
from flowrl.games.craftax_engine import OUT_OF_SIGHT, moments_file

WORLDS = 8
AGES = (1, 40, 160)  # steps that a random player has been there
DRAWN = 22
FRESH = 256  # new worlds, in which no skill may be done at once


def flat(features: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The features as arrays under the names of their leaves."""
    leaves: dict[str, np.ndarray] = {}
    for name, value in features.items():
        if dataclasses.is_dataclass(value):
            for item in dataclasses.fields(value):
                leaves[f"{name}.{item.name}"] = np.asarray(getattr(value, item.name))
        else:
            leaves[name] = np.asarray(value)
    return leaves


def played(game: Game) -> dict[str, np.ndarray]:
    """Features of worlds that were really there."""
    engine = game.make()

    def play(key, steps):
        world = settle(engine.reset(key))

        def on(carry, _):
            world, key = carry
            key, action_key, step_key = jax.random.split(key, 3)
            action = jax.random.randint(action_key, (), 0, game.num_actions)
            after, reward = engine.step(step_key, world, action)
            return (settle(after), key), (world, settle(after), reward)

        _, (before, after, reward) = jax.lax.scan(on, (world, key), None, length=steps)
        last = jax.tree.map(lambda leaf: leaf[-1], (before, after, reward))
        change = WorldStep(last[0], last[1], jnp.float32(last[2]), steps, steps)
        return engine.features(game.features, change)

    found = []
    for age in AGES:
        keys = jax.random.split(jax.random.key(age), WORLDS)
        found.append(flat(jax.jit(jax.vmap(lambda key, age=age: play(key, age)))(keys)))
    return {name: np.concatenate([part[name] for part in found]) for name in found[0]}


def fresh(game: Game) -> dict[str, np.ndarray]:
    """Features of new worlds, before anything is done in them."""
    engine = game.make()

    def begin(key):
        world = settle(engine.reset(key))
        return engine.features(game.features, WorldStep(world, world, jnp.float32(0), 1, 1))

    return flat(jax.jit(jax.vmap(begin))(jax.random.split(jax.random.key(0), FRESH)))


def drawn(real: dict[str, np.ndarray], game: Game) -> dict[str, np.ndarray]:
    """Features that a random player never sees, within the game's bounds."""
    random = np.random.default_rng(7)
    blocks = len(game.enums["BlockType"])
    bounds = {
        "facing_block": (0, blocks - 1),
        "player_intrinsics": (0, 9),
        "player_intrinsics_diff": (-3, 3),
        "achievements": (0, 1),
        "achievements_diff": (0, 1),
        "player_level": (0, real["monsters_killed"].shape[1] - 1),
        "monsters_killed": (0, 10),
        "monsters_killed_diff": (0, 1),
        "is_sleeping": (0, 1),
        "was_sleeping": (0, 1),
        "local_map": (0, blocks - 1),
        "light_level": (0, 1),
        "timestep": (1, 300),
        "episode_timestep": (1, 10_000),
        "env_reward": (-1, 8),
        "health_penalty": (-0.9, 0),
        "damage_dealt": (0, 8),
        "player_mana": (0, 15),
        "player_xp": (0, 5),
        **dict.fromkeys(("dexterity", "strength", "intelligence"), (1, 5)),
        **dict.fromkeys(("learned_spells", "chests_opened", "is_resting", "light_map"), (0, 1)),
        **dict.fromkeys(("sword_enchantment", "bow_enchantment", "armour_enchantments"), (0, 2)),
        "boss_progress": (0, 8),
        "boss_vulnerable": (0, 1),
    }
    rows: dict[str, np.ndarray] = {}
    for name, leaf in real.items():
        if name.startswith(("closest_", "nearest_")) and not name.endswith("_diff"):
            low, high = -3, 4
        elif "." in name:
            low, high = (-2, 2) if "_diff" in name else (0, game.capacity)
        elif name in bounds:
            low, high = bounds[name]
        else:
            low, high = (-1, 1) if name.endswith("_diff") else bounds[name.removesuffix("_prev")]
        shape = (DRAWN, *leaf.shape[1:])
        values = random.uniform(low, high, shape)
        if leaf.dtype.kind != "f" or name.startswith("player_intrinsics"):
            values = random.integers(low, high, shape, endpoint=True)
        if high == 4:  # some are out of sight, in both coordinates
            axis = len(shape) - (1 if shape[-1] == 2 else 2)
            hidden = random.random(shape).take([0], axis=axis) < 0.4
            values = np.where(hidden, OUT_OF_SIGHT, values)
        ends = [
            np.full(shape[1:], max(low, 0)),
            np.full(shape[1:], OUT_OF_SIGHT if high == 4 else high),
        ]
        rows[name] = np.concatenate([values, np.stack(ends)]).astype(leaf.dtype)
    return rows


def main() -> None:
    for game in (CLASSIC, FULL):
        real = played(game)
        other = drawn(real, game)
        both: dict[str, Any] = {name: np.concatenate([real[name], other[name]]) for name in real}
        package = game.constants.rpartition(".")[0]
        new: dict[str, Any] = fresh(game)
        files = {moments_file(package): both, moments_file(package, of="fresh"): new}
        for path, leaves in files.items():
            path.parent.mkdir(exist_ok=True)
            np.savez_compressed(path, **leaves)
            print(f"{path}: {len(leaves)} arrays, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
