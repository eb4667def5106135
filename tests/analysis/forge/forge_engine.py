"""A row of seven cells; what is used where is in `step`. Half of the players own a knife."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from flowrl.games.base import WorldStep

CELLS = 7
MOVES = jnp.array([0, -1, 1, 0])  # stay, left, right, use


class Cell(Enum):
    OVEN = 0
    FORGE = 1
    TABLE = 2
    ROCK = 3
    VINE = 5
    BUSH = 6


class Inventory(NamedTuple):
    berry: Any
    pie: Any
    ore: Any
    knife: Any
    grape: Any


class World(NamedTuple):
    cell: Any  # int32[]
    inventory: Inventory  # int32[] each
    fed: Any  # bool[]


class ForgeEngine:
    """An `Engine`; nobody dies here."""

    def reset(self, key: jax.Array) -> World:
        where, luck = jax.random.split(key)
        cell = jax.random.randint(where, (), 0, CELLS, jnp.int32)
        knife = jax.random.bernoulli(luck).astype(jnp.int32)
        none = jnp.int32(0)
        return World(cell, Inventory(none, none, none, knife, none), jnp.zeros((), bool))

    def step(self, key: jax.Array, world: World, action: jax.Array) -> tuple[World, jax.Array]:
        del key
        used = action == len(MOVES) - 1
        held = world.inventory

        def at(cell: Cell, *when: Any) -> jax.Array:
            here = used & (world.cell == cell.value)
            return here & jnp.array([True, *when]).all()

        picks = at(Cell.BUSH, held.berry < 9)
        bakes = at(Cell.OVEN, held.berry > 0, held.pie < 9)
        digs = at(Cell.ROCK, held.ore < 9)
        forges = at(Cell.FORGE, held.ore >= 2, held.knife == 0)
        cuts = at(Cell.VINE, held.knife > 0, held.grape < 9)
        feasts = at(Cell.TABLE, held.pie >= 3)
        inventory = Inventory(
            berry=held.berry + picks - bakes,
            pie=held.pie + bakes - 3 * feasts,
            ore=held.ore + digs - 2 * forges,
            knife=held.knife + forges,
            grape=held.grape + cuts,
        )
        cell = jnp.clip(world.cell + MOVES[action], 0, CELLS - 1).astype(jnp.int32)
        return World(cell, inventory, world.fed | feasts), feasts.astype(jnp.float32)

    def observe(self, world: World) -> jax.Array:
        carried = jnp.stack(world.inventory) / 3
        others = [carried.astype(jnp.float32), world.fed[None].astype(jnp.float32)]
        return jnp.concatenate([jax.nn.one_hot(world.cell, CELLS), *others])

    def is_over(self, world: World) -> jax.Array:
        return jnp.zeros_like(world.cell, bool)

    def holding(self, world: World, item: str, most: Any) -> World:
        fewer = jnp.minimum(getattr(world.inventory, item), most)
        return world._replace(inventory=world.inventory._replace(**{item: fewer}))

    def features(self, names: Iterable[str], step: WorldStep) -> dict[str, Any]:
        now, before = step.after, step.before
        known = {
            "inventory": now.inventory,
            "inventory_diff": jax.tree.map(jnp.subtract, now.inventory, before.inventory),
            "fed": now.fed,
            "fed_diff": now.fed.astype(jnp.int32) - before.fed.astype(jnp.int32),
            "cell": now.cell,
            "cell_prev": before.cell,
        }
        return {name: known[name] for name in names}
