"""How soon a thing can be found at all: `bench_search.py [--worlds 64] [--json FILE]`.

A player who is never hurt or hungry searches for a diamond from the nearest iron of Classic, or for
the first ladder of full Craftax from where it begins. It knows what has been in view. It goes to
the nearest cell of 4 × 4 fields whose middle never was in view, by the shortest way that it knows,
and digs through rock, which takes a timestep more. Its share is a measure for skills that search,
not a bound: one who guesses well where things lie is sooner there. So a second player knows that
diamonds lie in rock, and that there is more of it beside what is known: it goes where it expects to
see most new rock for each timestep.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from benchmarking import Row, arguments, report
from scipy.ndimage import distance_transform_edt, uniform_filter
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import dijkstra

from flowrl.envs.sight import CELL
from flowrl.games.base import Game, find_game

_WITHIN = (90, 150, 200, 300, 400)  # timesteps
_UNKNOWN = 1.5  # timesteps for a field that was never in view
_BLOCKED = 99.0
_COSTS = {"GRASS": 1, "SAND": 1, "PATH": 1, "STONE": 2, "COAL": 2, "IRON": 2, "DIAMOND": 2}
_ROCK = ("STONE", "PATH", "COAL", "IRON", "DIAMOND", "LAVA")
_LIKELY, _NEAR = 0.9, 8.0  # that a field beside rock is rock; fields after which that says little
_WATER = 3  # a stone is placed, mined and walked over
_BATCH = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A map, where the search begins, and where the thing is."""

    costs: np.ndarray
    """f32 `[rows, columns]`: timesteps to enter each field."""
    start: tuple[int, int]
    goals: np.ndarray
    """bool `[rows, columns]`"""
    rock: np.ndarray
    """bool `[rows, columns]`"""


Search = Callable[[World, tuple[int, int, int]], float]


def main() -> int:
    """Measure and report."""
    parser = arguments(__doc__)
    parser.add_argument("--worlds", type=int, default=64)
    args = parser.parse_args()
    count = _BATCH if args.small else args.worlds
    classic, full = "Craftax-Classic-Symbolic-v1", "Craftax-Symbolic-v1"
    cases: Mapping[str, tuple[str, Callable[[Any, Game], World], Search]] = {
        "a diamond, from iron": (classic, with_diamonds, nearest_unseen),
        "a diamond, from iron, in rock": (classic, with_diamonds, most_rock),
        "the first ladder": (full, with_ladder, nearest_unseen),
    }
    rows = []
    for name, (env_name, world_of, search) in cases.items():
        game = find_game(env_name)
        assert game.view is not None
        found = np.array([search(world_of(world, game), game.view) for world in made(game, count)])
        for within in _WITHIN:
            share = 100 * float(np.mean(found <= within))
            what = f"{name}, within {within} timesteps, of {len(found)} worlds"
            rows.append(Row(case=what, ours=share, baseline=None, unit="%", ratio=None))
    report("search", rows, args.json)
    return 0


def made(game: Game, count: int) -> list[Any]:
    """Fresh worlds of a game."""
    reset = jax.jit(jax.vmap(game.make().reset))
    worlds = []
    for number in range(-(-count // _BATCH)):
        batch = jax.device_get(reset(jax.random.split(jax.random.key(number), _BATCH)))
        worlds += [jax.tree.map(lambda leaf, i=i: leaf[i], batch) for i in range(_BATCH)]
    return worlds[:count]


def with_diamonds(world: Any, game: Game) -> World:
    """A world of Craftax-Classic; the search begins at the iron that is nearest to the start."""
    costs, is_of = costs_of(world.map, game)
    row, column = map(int, world.player_position)
    ways = ways_from(costs, (row, column))[0].reshape(costs.shape)
    iron = np.where(is_of("IRON"), ways, np.inf)
    place = np.unravel_index(np.argmin(iron), iron.shape)
    rock = np.any([is_of(name) for name in _ROCK], axis=0)
    start = (int(place[0]), int(place[1]))
    return World(costs=costs, start=start, goals=is_of("DIAMOND"), rock=rock)


def with_ladder(world: Any, game: Game) -> World:
    """The first floor of a world of Craftax."""
    costs, _ = costs_of(world.map[0], game)
    goals = np.zeros(costs.shape, bool)
    goals[tuple(world.down_ladders[0])] = True
    row, column = world.player_position
    return World(costs=costs, start=(int(row), int(column)), goals=goals, rock=goals)


def costs_of(blocks: np.ndarray, game: Game) -> tuple[np.ndarray, Callable[[str], np.ndarray]]:
    """The costs of a map of blocks, and the fields of a kind of block."""
    module = importlib.import_module(game.constants)
    number = {block.name: block.value for block in module.BlockType}
    costs = np.full(blocks.shape, _BLOCKED)
    for name, cost in {**_COSTS, "WATER": _WATER}.items():
        costs[blocks == number[name]] = cost
    return costs, lambda name: blocks == number[name]


def ways_from(costs: np.ndarray, start: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """The cost of the cheapest way to each field, and the field before it, by flat indices."""
    fields = np.arange(costs.size).reshape(costs.shape)
    sides = [(fields[:-1], fields[1:]), (fields[:, :-1], fields[:, 1:])]
    pairs = [pair for side in sides for pair in (side, side[::-1])]
    here, there = (np.concatenate([pair[way].ravel() for pair in pairs]) for way in (0, 1))
    edges = csr_matrix((costs.ravel()[there], (here, there)), shape=(costs.size, costs.size))
    return dijkstra(edges, indices=fields[start], return_predecessors=True)


def nearest_unseen(world: World, view: tuple[int, int, int]) -> float:
    """Timesteps until the player stands at a goal; infinite if it finds none in time."""
    rows, columns = world.costs.shape
    down, right = view[0] // 2, view[1] // 2
    middles = [CELL * np.arange(size // CELL) + CELL // 2 for size in (rows, columns)]
    known = np.zeros((rows, columns), bool)
    hidden = np.ones([len(middle) for middle in middles], bool)
    (row, column), taken = world.start, 0.0
    while taken <= max(_WITHIN) and hidden.any():
        known[max(0, row - down) : row + down + 1, max(0, column - right) : column + right + 1] = 1
        away = abs(middles[0] - row)[:, None], abs(middles[1] - column)
        hidden &= ~((away[0] <= down) & (away[1] <= right))
        costs = np.where(known, world.costs, _UNKNOWN)
        ways, before = ways_from(costs, (row, column))
        if (found := (known & world.goals).ravel()).any():
            return taken + float(ways[found].min())
        distance = np.where(hidden, away[0] + away[1], np.inf)
        cell = np.unravel_index(np.argmin(distance), hidden.shape)
        field = int(middles[0][cell[0]] * columns + middles[1][cell[1]])
        here = row * columns + column
        if field == here or ways[field] >= _BLOCKED:
            hidden[cell] = False  # it cannot be stood in
            continue
        row, column = next_field(before, here, field, columns)
        taken += float(costs[row, column])
    return np.inf


def most_rock(world: World, view: tuple[int, int, int]) -> float:
    """As `nearest_unseen`, for a player who expects rock beside rock."""
    rows, columns = world.costs.shape
    seen: Any = view[:2]
    known = np.zeros((rows, columns), bool)
    (row, column), taken = world.start, 0.0
    while taken <= max(_WITHIN) and not known.all():
        down, right = view[0] // 2, view[1] // 2
        known[max(0, row - down) : row + down + 1, max(0, column - right) : column + right + 1] = 1
        costs = np.where(known, world.costs, _UNKNOWN)
        ways, before = ways_from(costs, (row, column))
        if (found := (known & world.goals).ravel()).any():
            return taken + float(ways[found].min())
        distances: Any = distance_transform_edt(~known, return_indices=True)
        away, nearest = distances
        says = np.exp(-away / _NEAR)
        beside = np.where(world.rock[tuple(nearest)], _LIKELY * says + 0.1, 0.1 * (1 - says))
        new = uniform_filter(np.where(known, 0.0, beside), seen, mode="constant").ravel()
        field = int(np.argmax(np.where(ways < _BLOCKED, new / (ways + 2), 0)))
        here = row * columns + column
        if field == here:
            return np.inf  # what is left cannot be seen
        row, column = next_field(before, here, field, columns)
        taken += float(costs[row, column])
    return np.inf


def next_field(before: np.ndarray, here: int, field: int, columns: int) -> tuple[int, int]:
    """The first field on the way to another."""
    while before[field] != here:
        field = int(before[field])
    return divmod(field, columns)


if __name__ == "__main__":
    sys.exit(main())
