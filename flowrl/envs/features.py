"""The features that skill functions may ask for, each computed only when one asks for it.

The names and their meaning are listed in `flowrl.skills.admitted.INJECTED`. Positions are
(dy, dx), the thing's less the player's; distance is |dy| + |dx|, the steps it takes to walk.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flowrl.errors import SkillError

NEAREST = 5  # positions per block type
OUT_OF_SIGHT = 30  # stands for "none in view" in both coordinates
HEALTH_WEIGHT = 0.1  # of a lost point of health, as in the game's own reward
WORD_BITS = 32
MOBS = {
    "craftax.craftax_classic": ("zombies", "cows", "skeletons"),
    "craftax.craftax": ("melee_mobs", "passive_mobs", "ranged_mobs"),
}


@dataclass(frozen=True, kw_only=True)
class Game:
    """What the features need to know of one of the two Craftax packages."""

    package: str
    num_blocks: int
    out_of_bounds: int
    directions: np.ndarray
    """int32[actions, 2]: the step of each direction."""
    cells: np.ndarray
    """int32[cells in view, 2]: offsets from the player, nearest first, then by row, column."""

    @classmethod
    def of(cls, package: str) -> Game:
        """The game whose constants are in `package`."""
        constants = importlib.import_module(f"{package}.constants")
        return cls(
            package=package,
            num_blocks=len(constants.BlockType),
            out_of_bounds=constants.BlockType.OUT_OF_BOUNDS.value,
            directions=np.asarray(constants.DIRECTIONS),
            cells=_cells_in_view(*constants.OBS_DIM),
        )

    @property
    def reach(self) -> np.ndarray:
        """int32[2]: how far the player sees up or down, and left or right."""
        return self.cells.max(axis=0)


class Moment(NamedTuple):
    """One step of one environment: the world before and after it, and the game's reward."""

    before: Any
    after: Any
    env_reward: jax.Array


def asked_by(function: Callable[..., Any]) -> tuple[str, ...]:
    """The features a skill function asks for; n has its value as a default and is none."""
    parameters = inspect.signature(function).parameters.values()
    return tuple(item.name for item in parameters if item.default is inspect.Parameter.empty)


def takes_count(function: Callable[..., Any]) -> bool:
    """Whether a skill function has the parameter n."""
    return "n" in inspect.signature(function).parameters


def compute(names: Iterable[str], game: Game, moment: Moment) -> dict[str, Any]:
    """The named features of a step.

    Raises:
      SkillError: there is no feature of that name.
    """
    return {name: _feature(name, game, moment) for name in sorted(set(names))}


def _feature(name: str, game: Game, moment: Moment) -> Any:
    if name in OF_STEP:
        return OF_STEP[name](moment)
    if name in OF_WORLD:
        return OF_WORLD[name](game, moment.after)
    base = name.removesuffix("_prev")
    if base != name and base in OF_WORLD:
        return OF_WORLD[base](game, moment.before)
    base = name.removesuffix("_diff")
    if base != name and base in OF_WORLD:
        values = [OF_WORLD[base](game, world) for world in (moment.after, moment.before)]
        return jax.tree.map(jnp.subtract, *values)
    raise SkillError(
        f"there is no feature {name!r}; ask for one of {sorted({*OF_WORLD, *OF_STEP})}"
    )


def _cells_in_view(height: int, width: int) -> np.ndarray:
    rows, columns = height // 2, width // 2
    offsets = [(dy, dx) for dy in range(-rows, rows + 1) for dx in range(-columns, columns + 1)]
    return np.array(sorted(offsets, key=lambda cell: (abs(cell[0]) + abs(cell[1]), cell)), np.int32)


def _blocks(world: Any) -> jax.Array:
    """The map of the player's floor."""
    return world.map if world.map.ndim == 2 else world.map[world.player_level]


def _block_at(game: Game, blocks: jax.Array, positions: jax.Array) -> jax.Array:
    """BlockType values at positions `[..., 2]`, which may lie outside the map."""
    size = jnp.array(blocks.shape)
    inside = ((positions >= 0) & (positions < size)).all(axis=-1)
    rows, columns = jnp.moveaxis(jnp.clip(positions, 0, size - 1), -1, 0)
    found = blocks.at[rows, columns].get(mode="promise_in_bounds")
    return jnp.where(inside, found, game.out_of_bounds)


def _closest_blocks(game: Game, world: Any) -> jax.Array:
    """int32[block types, 2, NEAREST]: the first cells of each type, in order of distance.

    The order of the cells is the same in every step, so each type's cells become the bits of a
    few words and the nearest are the lowest bits: no sorting, no top-k.
    """
    seen = _block_at(game, _blocks(world), world.player_position + game.cells)
    matches = seen[None, :] == jnp.arange(game.num_blocks)[:, None]
    cells = len(game.cells)
    words = _pack(matches)
    found = []
    for _ in range(NEAREST):
        index, words = _pop_lowest(words, none=cells)
        found.append(index)
    offsets = np.concatenate([game.cells, np.full((1, 2), OUT_OF_SIGHT, np.int32)])
    return jnp.asarray(offsets)[jnp.stack(found, axis=-1)].swapaxes(-1, -2)


def _pack(matches: jax.Array) -> list[jax.Array]:
    """Rows of booleans as words, cell i as bit i % 32 of word i // 32."""
    words = []
    for start in range(0, matches.shape[-1], WORD_BITS):
        part = matches[:, start : start + WORD_BITS]
        weights = jnp.left_shift(jnp.uint32(1), jnp.arange(part.shape[-1], dtype=jnp.uint32))
        words.append(jnp.where(part, weights, 0).sum(axis=-1, dtype=jnp.uint32))
    return words


def _pop_lowest(words: list[jax.Array], *, none: int) -> tuple[jax.Array, list[jax.Array]]:
    """The index of the lowest bit set over all words (`none`: no bit), and the rest."""
    index = jnp.full(words[0].shape, none, jnp.int32)
    taken = jnp.zeros(words[0].shape, bool)
    rest = []
    for number, word in enumerate(words):
        here = (word != 0) & ~taken
        bit = jax.lax.population_count((word & -word) - 1).astype(jnp.int32)
        index = jnp.where(here, WORD_BITS * number + bit, index)
        rest.append(jnp.where(here, word & (word - 1), word))
        taken |= here
    return index, rest


def _facing_block(game: Game, world: Any) -> jax.Array:
    ahead = world.player_position + jnp.asarray(game.directions)[world.player_direction]
    return _block_at(game, _blocks(world), ahead).astype(jnp.int32)


def _nearest_mobs(game: Game, world: Any) -> jax.Array:
    """int32[3, 2]: offsets of the nearest mob of each kind in view."""
    return jnp.stack([_nearest(game, world, getattr(world, kind)) for kind in MOBS[game.package]])


def _nearest(game: Game, world: Any, mobs: Any) -> jax.Array:
    if mobs.mask.ndim == 2:
        mobs = jax.tree.map(lambda leaf: leaf[world.player_level], mobs)
    offsets = mobs.position - world.player_position
    visible = mobs.mask & (jnp.abs(offsets) <= game.reach).all(axis=-1)
    distance = jnp.where(visible, jnp.abs(offsets).sum(axis=-1), 2 * OUT_OF_SIGHT)
    return jnp.where(visible.any(), offsets[jnp.argmin(distance)], OUT_OF_SIGHT)


def _intrinsics(_: Game, world: Any) -> jax.Array:
    values = (world.player_health, world.player_food, world.player_drink, world.player_energy)
    return jnp.stack([jnp.asarray(value, jnp.float32) for value in values])


def _player_level(_: Game, world: Any) -> jax.Array:
    return jnp.asarray(getattr(world, "player_level", 0), jnp.int32)


def _monsters_killed(_: Game, world: Any) -> jax.Array:
    return jnp.asarray(getattr(world, "monsters_killed", np.zeros(1)), jnp.int32)


def _health_penalty(moment: Moment) -> jax.Array:
    change = moment.after.player_health - moment.before.player_health
    return HEALTH_WEIGHT * jnp.minimum(change, 0).astype(jnp.float32)


OF_WORLD: Mapping[str, Callable[[Game, Any], Any]] = {
    "inventory": lambda _, world: world.inventory,
    "closest_blocks": _closest_blocks,
    "facing_block": _facing_block,
    "player_intrinsics": _intrinsics,
    "achievements": lambda _, world: world.achievements.astype(jnp.int32),
    "player_level": _player_level,
    "monsters_killed": _monsters_killed,
    "nearest_mobs": _nearest_mobs,
}
OF_STEP: Mapping[str, Callable[[Moment], Any]] = {
    "is_sleeping": lambda moment: moment.after.is_sleeping,
    "was_sleeping": lambda moment: moment.before.is_sleeping,
    "env_reward": lambda moment: moment.env_reward,
    "health_penalty": _health_penalty,
}
