"""The tiny game's worlds: whoever uses the bush gets a berry, whoever uses the oven bakes a pie."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flowrl.games.base import WorldStep

CELLS = 5
MOVES = jnp.array([0, -1, 1, 0])  # stay, left, right, use


class Cell(Enum):
    OVEN = 0
    BUSH = CELLS - 1


class Inventory(NamedTuple):
    berry: Any
    pie: Any


class World(NamedTuple):
    cell: Any  # int32[]
    inventory: Inventory  # int32[] each


class TinyEngine:
    """An `Engine`; nobody dies here."""

    def reset(self, key: jax.Array) -> World:
        cell = jax.random.randint(key, (), 0, CELLS, jnp.int32)
        return World(cell, Inventory(jnp.int32(0), jnp.int32(0)))

    def step(self, key: jax.Array, world: World, action: jax.Array) -> tuple[World, jax.Array]:
        del key
        used = action == len(MOVES) - 1
        berry, pie = world.inventory
        picks = used & (world.cell == Cell.BUSH.value) & (berry < 9)
        bakes = used & (world.cell == Cell.OVEN.value) & (berry > 0) & (pie < 9)
        cell = jnp.clip(world.cell + MOVES[action], 0, CELLS - 1)
        inventory = Inventory(berry + picks - bakes, pie + bakes)
        return World(cell.astype(jnp.int32), inventory), bakes.astype(jnp.float32)

    def observe(self, world: World) -> jax.Array:
        carried = jnp.stack(world.inventory) / 9
        return jnp.concatenate([jax.nn.one_hot(world.cell, CELLS), carried.astype(jnp.float32)])

    def is_over(self, world: World) -> jax.Array:
        return jnp.zeros_like(world.cell, bool)

    def features(self, names: Iterable[str], step: WorldStep) -> dict[str, Any]:
        now, before = step.after, step.before
        known = {
            "inventory": now.inventory,
            "inventory_diff": jax.tree.map(jnp.subtract, now.inventory, before.inventory),
            "cell": now.cell,
            "cell_diff": now.cell - before.cell,
            "timestep": jnp.asarray(step.timestep, jnp.int32),
            "episode_timestep": jnp.asarray(step.episode_timestep, jnp.int32),
        }
        return {name: known[name] for name in names}

    def moments(self) -> Mapping[str, Any]:
        cells = np.arange(30, dtype=np.int32) % CELLS
        counts = np.arange(30, dtype=np.int32) % 10
        changes = counts % 3 - 1
        return {
            "inventory": Inventory(counts, counts[::-1]),
            "inventory_diff": Inventory(changes, changes[::-1]),
            "cell": cells,
            "cell_diff": changes,
            "timestep": 1 + cells,
            "episode_timestep": 1 + counts,
        }


def draw(world: World) -> np.ndarray:
    picture = np.full((8, 8 * CELLS, 3), 90, np.uint8)
    picture[:, 8 * int(world.cell) : 8 * int(world.cell) + 8] = 255
    return picture
