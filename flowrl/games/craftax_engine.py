"""Craftax's two games as engines, and the features of their worlds.

A feature is computed only when a skill function asks for it; `flowrl.games.craftax` lists them.
Positions are (dy, dx), the thing's less the player's; distance is |dy| + |dx|, the steps it takes
to walk. Of full Craftax only what the observation shows is told: nothing of cells without light.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from craftax.craftax_env import make_craftax_env_from_name

from flowrl.errors import SkillError
from flowrl.games.base import INVENTORIES, WorldStep
from flowrl.games.fast_craftax import craftax_step, craftax_view, with_names

NEAREST = 5  # positions per block type
OUT_OF_SIGHT = 30  # stands for "none in view" in both coordinates
_HEALTH_WEIGHT = 0.1  # of a lost point of health, as in the game's own reward
_WORD_BITS = 32
_BETWEEN_FLOORS = 8  # fields: no floor is within the window of visited cells of another
_NEVER = np.iinfo(np.int32).max
_MOBS = {
    "craftax.craftax_classic": ("zombies", "cows", "skeletons"),
    "craftax.craftax": ("melee_mobs", "passive_mobs", "ranged_mobs"),
}
_SHOTS = {
    "craftax.craftax_classic": ("arrows",),
    "craftax.craftax": ("mob_projectiles", "player_projectiles"),
}
_MOB_TYPES = 8  # of each kind, as the game numbers them
_NUMBERS = {  # feature → field of the state, of whole numbers or truth values
    **{name: name for name in ("player_mana", "player_xp", "learned_spells", "chests_opened")},
    **{name: f"player_{name}" for name in ("dexterity", "strength", "intelligence")},
    **{name: name for name in ("sword_enchantment", "bow_enchantment", "armour_enchantments")},
    "boss_progress": "boss_progress",
}
_LIT = 0.05  # of a cell's light: above, the observation of full Craftax shows the cell
_STATES = {
    "craftax.craftax_classic": "craftax.craftax_classic.envs.craftax_state",
    "craftax.craftax": "craftax.craftax.craftax_state",
}


class CraftaxEngine:
    """An `Engine`: one of the Craftax packages, of which each part is loaded when it is needed.

    Args:
      name: the game's name, which Craftax knows too.
      package: `craftax.craftax_classic` or `craftax.craftax`.
      fast: step and observe by `flowrl.games.fast_craftax`; False is Craftax's own code.
    """

    def __init__(self, name: str, package: str, *, fast: bool = True) -> None:
        self._name, self._package, self._fast = name, package, fast

    def reset(self, key: jax.Array) -> Any:
        """A newly generated world: Craftax's EnvState."""
        return self._env.reset_env(key, self._params)[1]

    def step(self, key: jax.Array, world: Any, action: jax.Array) -> tuple[Any, jax.Array]:
        """The world after an action, int32[], and the game's own reward, a scalar."""
        return self._step(key, world, action, self._params, self._env.static_env_params)

    def observe(self, world: Any) -> jax.Array:
        """Craftax's symbolic observation: f32[observation_size]."""
        return self._view(world)

    def position(self, world: Any) -> jax.Array:
        """int32[2]: the player's row and column; each floor lies below the one before it."""
        row, column = world.player_position
        floor = getattr(world, "player_level", 0)
        rows = world.map.shape[-2] + _BETWEEN_FLOORS
        return jnp.stack([row + floor * rows, column]).astype(jnp.int32)

    def cause(self, step: WorldStep) -> jax.Array:
        """int32[]: index into `Game.causes`, if the player died in this timestep."""
        return _cause(step, self._constants)

    def is_over(self, world: Any) -> jax.Array:
        """bool[]: the player is dead, or has won."""
        return self._env.is_terminal(world, self._params)

    def features(self, names: Iterable[str], step: WorldStep) -> dict[str, Any]:
        """The named features of a timestep.

        Raises:
          SkillError: there is no feature of that name.
        """
        return {name: _feature(name, self._constants, step) for name in sorted(set(names))}

    def holding(self, world: Any, item: str, most: Any) -> Any:
        """The world in which the player holds at most this many of an item, int32[]."""
        held = jnp.minimum(getattr(world.inventory, item), most)
        return world.replace(inventory=world.inventory.replace(**{item: held}))

    def moments(self) -> Mapping[str, Any]:
        """Every feature, leaves `[moments, …]`; inventories are Craftax's own struct.

        Half of the moments were played: new worlds, and some in which a random player had been for
        a while. The other half has inventories, achievements, positions and needs that a random
        player never sees, drawn at random within the game's bounds; the last two are a moment of
        zeros and one of the largest values. `scripts/write_moments.py` makes the files.
        """
        return self._kept(moments_file(self._package))

    def fresh(self) -> Mapping[str, Any]:
        """Every feature in new worlds, and by night where a random player was, leaves `[W, …]`."""
        new = self._kept(moments_file(self._package, of="fresh"))
        played = jax.tree.map(lambda leaf: leaf[: len(leaf) // 2], self.moments())
        played |= {"light_level": np.zeros_like(played["light_level"])}
        return jax.tree.map(lambda *leaves: np.concatenate(leaves), new, played)

    def _kept(self, path: Path) -> Mapping[str, Any]:
        with np.load(path, allow_pickle=False) as file:
            leaves = {name: file[name] for name in file.files}
        inventory = importlib.import_module(_STATES[self._package]).Inventory
        features: dict[str, Any] = {name: leaf for name, leaf in leaves.items() if "." not in name}
        for name in INVENTORIES:
            items = [field.name for field in dataclasses.fields(inventory)]
            features[name] = inventory(**{item: leaves[f"{name}.{item}"] for item in items})
        return features

    @cached_property
    def _env(self) -> Any:
        with jax.ensure_compile_time_eval():  # its constants outlive a trace that asks first
            importlib.import_module(f"{self._package}.constants")
            return make_craftax_env_from_name(self._name, auto_reset=False)

    @cached_property
    def _params(self) -> Any:
        # The time limit is ours: without Craftax's own, its `done` means death or victory.
        with jax.ensure_compile_time_eval():
            return self._env.default_params.replace(max_timesteps=_NEVER)

    @cached_property
    def _step(self) -> Callable[..., tuple[Any, Any]]:
        with jax.ensure_compile_time_eval():
            return craftax_step(self._package, fast=self._fast)

    @cached_property
    def _view(self) -> Callable[[Any], jax.Array]:
        with jax.ensure_compile_time_eval():
            return craftax_view(self._package, fast=self._fast)

    @cached_property
    def _constants(self) -> _Constants:
        with jax.ensure_compile_time_eval():
            return _Constants.of(self._package)


def _cause(step: WorldStep, known: _Constants) -> jax.Array:
    """The cause of the player's death; where several things hurt, the first of `Game.causes`.

    A mob that hits begins to wait as long as none does otherwise; a projectile that hits is gone.
    """
    before, after, classic = step.before, step.after, known.package.endswith("_classic")
    melee = [getattr(world, _MOBS[known.package][0]) for world in (before, after)]
    shots = before.arrows if classic else before.mob_projectiles
    ways = before.arrow_directions if classic else before.mob_projectile_directions
    if not classic:
        level = before.player_level
        *melee, shots, ways = jax.tree.map(lambda leaf: leaf[level], (*melee, shots, ways))
    was, now = melee
    hit = (was.mask & (now.attack_cooldown > was.attack_cooldown)).any()
    lost = before.player_health - after.player_health
    hit &= lost > 0
    reaches = (shots.position + ways == after.player_position).all(axis=-1)
    found = [
        _block_at(known, _blocks(after), after.player_position) == known.lava,
        hit & before.is_sleeping,
        hit,
        (shots.mask & reaches).any() | (lost > 1),  # one that was shot in this timestep
        after.player_food <= 0,
        after.player_drink <= 0,
        after.player_energy <= 0,
        True,
    ]
    return jnp.argmax(jnp.stack([jnp.asarray(each, bool) for each in found])).astype(jnp.int32)


def moments_file(package: str, *, of: str = "played") -> Path:
    """Return the file of the moments of a Craftax package: played and drawn, or fresh ones."""
    name = package.rpartition(".")[2] + ("_fresh" if of == "fresh" else "")
    return Path(__file__).parent / "moments" / f"{name}.npz"


def pixel_renderer(package: str) -> Callable[[Any], jax.Array]:
    """The function from a world to Craftax's own picture of it, uint8 `[H, W, 3]`."""
    renderer = importlib.import_module(f"{package}.renderer")
    constants = importlib.import_module(f"{package}.constants")
    size = constants.BLOCK_PIXEL_SIZE_IMG
    # Craftax makes its textures in three sizes, for minutes, and pickles them into its package.
    with jax.ensure_compile_time_eval():
        textures = {size: constants.load_all_textures_given_size(size)}
    make = with_names(renderer.make_craftax_pixel_renderer, load_all_textures=lambda: textures)
    draw = make(size)
    return jax.jit(lambda world: jnp.clip(draw(world), 0, 255).astype(jnp.uint8))


@dataclass(frozen=True, kw_only=True)
class _Constants:
    """Constants of one of the two Craftax packages, for the features."""

    package: str
    num_blocks: int
    out_of_bounds: int
    lava: int
    directions: np.ndarray
    """int32[actions, 2]: the step of each direction."""
    cells: np.ndarray
    """int32[cells in view, 2]: offsets from the player, nearest first, then by row, column."""

    @classmethod
    def of(cls, package: str) -> _Constants:
        """The constants of a package."""
        constants = importlib.import_module(f"{package}.constants")
        return cls(
            package=package,
            num_blocks=len(constants.BlockType),
            out_of_bounds=constants.BlockType.OUT_OF_BOUNDS.value,
            lava=constants.BlockType.LAVA.value,
            directions=np.asarray(constants.DIRECTIONS),
            cells=_cells_in_view(*constants.OBS_DIM),
            view=constants.OBS_DIM,
            item_types=getattr(constants, "ItemType", None),
            kills_to_descend=getattr(constants, "MONSTERS_KILLED_TO_CLEAR_LEVEL", 0),
        )

    view: tuple[int, int]
    """Rows and columns of cells in view."""
    item_types: Any
    """The enum of what lies on a cell; None in Classic."""
    kills_to_descend: int
    """Foes of a floor that must be killed before its ladder down is open."""

    def is_boss_vulnerable(self, world: Any) -> jax.Array:
        """bool[]: the boss can be hurt now."""
        logic = importlib.import_module(f"{self.package}.util.game_logic_utils")
        return jnp.asarray(logic.is_boss_vulnerable(world), bool)

    @property
    def reach(self) -> np.ndarray:
        """int32[2]: how far the player sees up or down, and left or right."""
        return self.cells.max(axis=0)


def _feature(name: str, known: _Constants, step: WorldStep) -> Any:
    if name in _OF_STEP:
        return _OF_STEP[name](known, step)
    if name in _OF_WORLD:
        return _OF_WORLD[name](known, step.after)
    base = name.removesuffix("_prev")
    if base != name and base in _OF_WORLD:
        return _OF_WORLD[base](known, step.before)
    base = name.removesuffix("_diff")
    if base != name and base in _OF_WORLD:
        values = [_OF_WORLD[base](known, world) for world in (step.after, step.before)]
        return jax.tree.map(_less, *values)
    raise SkillError(
        f"there is no feature {name!r}; ask for one of {sorted({*_OF_WORLD, *_OF_STEP})}"
    )


def _less(one: Any, other: Any) -> jax.Array:
    """The difference of two values; of truth values -1, 0 or 1."""
    if jnp.result_type(one).kind == "b":
        one, other = jnp.int32(one), jnp.int32(other)
    return jnp.subtract(one, other)


def _cells_in_view(height: int, width: int) -> np.ndarray:
    rows, columns = height // 2, width // 2
    offsets = [(dy, dx) for dy in range(-rows, rows + 1) for dx in range(-columns, columns + 1)]
    return np.array(sorted(offsets, key=lambda cell: (abs(cell[0]) + abs(cell[1]), cell)), np.int32)


def _blocks(world: Any) -> jax.Array:
    """The map of the player's floor."""
    return world.map if world.map.ndim == 2 else world.map[world.player_level]


def _block_at(known: _Constants, blocks: jax.Array, positions: jax.Array) -> jax.Array:
    """BlockType values at positions `[..., 2]`, which may lie outside the map."""
    size = jnp.array(blocks.shape)
    inside = ((positions >= 0) & (positions < size)).all(axis=-1)
    rows, columns = jnp.moveaxis(jnp.clip(positions, 0, size - 1), -1, 0)
    values = blocks.at[rows, columns].get(mode="promise_in_bounds")
    return jnp.where(inside, values, known.out_of_bounds)


def _lit(world: Any, positions: jax.Array) -> jax.Array:
    """bool[…]: which of the positions `[…, 2]` have light; in Classic all, even in the night."""
    if not hasattr(world, "light_map"):
        return jnp.ones(positions.shape[:-1], bool)
    light = world.light_map[world.player_level]
    size = jnp.array(light.shape)
    inside = ((positions >= 0) & (positions < size)).all(axis=-1)
    rows, columns = jnp.moveaxis(jnp.clip(positions, 0, size - 1), -1, 0)
    return inside & (light.at[rows, columns].get(mode="promise_in_bounds") > _LIT)


def _seen_at(known: _Constants, world: Any, offsets: Any) -> jax.Array:
    """BlockType values at offsets `[…, 2]` from the player; INVALID where nothing is seen."""
    positions = world.player_position + offsets
    return jnp.where(_lit(world, positions), _block_at(known, _blocks(world), positions), 0)


def _closest_blocks(known: _Constants, world: Any) -> jax.Array:
    return _closest(known, _seen_at(known, world, known.cells), known.num_blocks)


def _closest_items(known: _Constants, world: Any) -> jax.Array:
    """int32[item types, 2, NEAREST]: as `_closest_blocks`; a ladder down may be blocked."""
    positions = world.player_position + known.cells
    level, item = world.player_level, known.item_types
    items = _block_at(known, world.item_map[level], positions)
    blocked = world.monsters_killed[level] < known.kills_to_descend
    down = jnp.where(blocked, item.LADDER_DOWN_BLOCKED.value, item.LADDER_DOWN.value)
    items = jnp.where(items == item.LADDER_DOWN.value, down, items)
    return _closest(known, jnp.where(_lit(world, positions), items, -1), len(item))


def _closest(known: _Constants, seen: jax.Array, kinds: int) -> jax.Array:
    """int32[kinds, 2, NEAREST]: the first cells of each kind, in order of distance.

    The order of the cells is the same in every step, so each kind's cells become the bits of a
    few words and the nearest are the lowest bits: no sorting, no top-k.
    """
    matches = seen[None, :] == jnp.arange(kinds)[:, None]
    cells = len(known.cells)
    words = _pack(matches)
    indices = []
    for _ in range(NEAREST):
        index, words = _pop_lowest(words, none=cells)
        indices.append(index)
    offsets = np.concatenate([known.cells, np.full((1, 2), OUT_OF_SIGHT, np.int32)])
    return jnp.asarray(offsets)[jnp.stack(indices, axis=-1)].swapaxes(-1, -2)


def _pack(matches: jax.Array) -> list[jax.Array]:
    """Rows of booleans as words, cell i as bit i % 32 of word i // 32."""
    words = []
    for start in range(0, matches.shape[-1], _WORD_BITS):
        part = matches[:, start : start + _WORD_BITS]
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
        index = jnp.where(here, _WORD_BITS * number + bit, index)
        rest.append(jnp.where(here, word & (word - 1), word))
        taken |= here
    return index, rest


def _facing_block(known: _Constants, world: Any) -> jax.Array:
    ahead = jnp.asarray(known.directions)[world.player_direction]
    return _seen_at(known, world, ahead).astype(jnp.int32)


def _local_map(known: _Constants, world: Any) -> jax.Array:
    """int32[rows, columns]: the cells in view, the player in the middle."""
    return _seen_at(known, world, _window(known)).astype(jnp.int32)


def _light_map(known: _Constants, world: Any) -> jax.Array:
    """bool[rows, columns]: the cells in view that have light, the player in the middle."""
    return _lit(world, world.player_position + _window(known))


def _window(known: _Constants) -> np.ndarray:
    return np.indices(known.view).transpose(1, 2, 0) - np.array(known.view) // 2


def _nearest_mobs(known: _Constants, world: Any) -> jax.Array:
    """int32[3, 2]: offsets of the nearest mob of each kind in view."""
    kinds = _MOBS[known.package]
    return jnp.stack([_nearest(known, world, getattr(world, kind))[0] for kind in kinds])


def _closest_mobs(known: _Constants, world: Any) -> jax.Array:
    """int32[3, 8, 2]: offsets of the nearest mob in view by MobType and the mob's own number."""
    kinds = (world.passive_mobs, world.melee_mobs, world.ranged_mobs)
    return jnp.stack([_nearest(known, world, mobs, types=_MOB_TYPES) for mobs in kinds])


def _nearest_projectiles(known: _Constants, world: Any) -> jax.Array:
    """int32[projectiles of mobs, in full Craftax also of the player; 2]."""
    kinds = _SHOTS[known.package]
    return jnp.stack([_nearest(known, world, getattr(world, kind))[0] for kind in kinds])


def _nearest(known: _Constants, world: Any, mobs: Any, *, types: int = 1) -> jax.Array:
    """int32[types, 2]: offsets of the nearest mob in view of each type; with one, of any."""
    if mobs.mask.ndim == 2:
        mobs = jax.tree.map(lambda leaf: leaf[world.player_level], mobs)
    offsets = mobs.position - world.player_position
    visible = mobs.mask & (jnp.abs(offsets) <= known.reach).all(axis=-1)
    visible &= _lit(world, mobs.position)
    of_type = visible[None]
    if types > 1:
        of_type = visible & (mobs.type_id == jnp.arange(types)[:, None])
    distance = jnp.where(of_type, jnp.abs(offsets).sum(axis=-1), 2 * OUT_OF_SIGHT)
    found = offsets[jnp.argmin(distance, axis=1)]
    return jnp.where(of_type.any(axis=1)[:, None], found, OUT_OF_SIGHT).astype(jnp.int32)


def _intrinsics(_: _Constants, world: Any) -> jax.Array:
    values = (world.player_health, world.player_food, world.player_drink, world.player_energy)
    return jnp.stack([jnp.asarray(value, jnp.float32) for value in values])


def _player_level(_: _Constants, world: Any) -> jax.Array:
    return jnp.asarray(getattr(world, "player_level", 0), jnp.int32)


def _monsters_killed(_: _Constants, world: Any) -> jax.Array:
    return jnp.asarray(getattr(world, "monsters_killed", np.zeros(1)), jnp.int32)


def _number(field: str, _: _Constants, world: Any) -> jax.Array:
    return jnp.asarray(getattr(world, field), jnp.int32)


def _damage_dealt(known: _Constants, step: WorldStep) -> jax.Array:
    """f32[]: health that foes lost, at most what they had."""
    melee, _, ranged = _MOBS[known.package]
    lost = jnp.zeros((), jnp.float32)
    for kind in (melee, ranged):
        was, now = (getattr(world, kind) for world in (step.before, step.after))
        change = was.health - jnp.maximum(now.health, 0)  # below 0 where a new foe took the place
        lost += jnp.where(was.mask, jnp.maximum(change, 0), 0).sum()
    return lost


def _health_penalty(_: _Constants, step: WorldStep) -> jax.Array:
    change = step.after.player_health - step.before.player_health
    return _HEALTH_WEIGHT * jnp.minimum(change, 0).astype(jnp.float32)


_OF_WORLD: Mapping[str, Callable[[_Constants, Any], Any]] = {
    "inventory": lambda _, world: world.inventory,
    "closest_blocks": _closest_blocks,
    "facing_block": _facing_block,
    "player_intrinsics": _intrinsics,
    "achievements": lambda _, world: world.achievements.astype(jnp.int32),
    "player_level": _player_level,
    "monsters_killed": _monsters_killed,
    "nearest_mobs": _nearest_mobs,
    "local_map": _local_map,
    "light_level": lambda _, world: jnp.asarray(world.light_level, jnp.float32),
    "nearest_projectiles": _nearest_projectiles,
    "closest_items": _closest_items,
    "closest_mobs": _closest_mobs,
    "light_map": _light_map,
    "boss_vulnerable": lambda known, world: known.is_boss_vulnerable(world),
    "is_resting": lambda _, world: jnp.asarray(world.is_resting, bool),
    **{name: partial(_number, field) for name, field in _NUMBERS.items()},
}
_OF_STEP: Mapping[str, Callable[[_Constants, WorldStep], Any]] = {
    "is_sleeping": lambda _, step: step.after.is_sleeping,
    "was_sleeping": lambda _, step: step.before.is_sleeping,
    "env_reward": lambda _, step: step.env_reward,
    "timestep": lambda _, step: jnp.asarray(step.timestep, jnp.int32),
    "episode_timestep": lambda _, step: jnp.asarray(step.episode_timestep, jnp.int32),
    "health_penalty": _health_penalty,
    "damage_dealt": _damage_dealt,
}
