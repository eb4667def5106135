"""Craftax's step and observation, faster on CPUs and with the same results.

On a CPU each operation of a compiled program costs a microsecond to start, whatever it does, and a
step of Craftax starts thousands: loops over ten kinds of blocks or eight neighbouring cells, and
the loop of jax's cipher for each of eighty random numbers. Mobs are placed by summing up
probabilities over all cells of the map, though they appear only near the player, and a padded copy
of the map is made to look at 63 cells of it. Here, instead,

- loops that carry nothing on take all their turns at once,
- the cipher behind jax's random numbers is written out, bit for bit, for up to _FEW numbers,
- mobs are placed on the part of the map where they can appear, rows first and then one row alone:
  the same cell from the same random number, but for rounding where two cells meet, about once in a
  hundred thousand draws,
- plants are written to the map when they ripen, and views are cut out without a padded copy.

All this is done for Classic. Of full Craftax the choice of a cell is in two levels, plants are
written as in Classic, and the parts of a step see the player's floor alone: loops over mobs copy
the map of each floor, nine in all. Nothing of Craftax or jax is changed: its functions are rebuilt
from their own code, with some of the names that they use standing for ours.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

_CLASSIC = "craftax.craftax_classic"
_LEAST_CELLS = 512  # below, one level is as fast
_RIPE = 600  # steps that a plant grows
_FEW = 8  # numbers at once; for more the loop does not matter
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA
_KINDS = ("cows", "zombies", "skeletons", "passive_mobs", "melee_mobs", "ranged_mobs")


def craftax_step(package: str, *, fast: bool = True) -> Callable[..., tuple[Any, Any]]:
    """The `craftax_step(key, world, action, params, static_params)` of a Craftax package."""
    logic = importlib.import_module(f"{package}.game_logic")
    if not fast:
        return logic.craftax_step
    if package != _CLASSIC:
        return _on_one_floor(logic)
    names = _rebuilt(logic, jax=_quick_jax())
    names["spawn_mobs"] = _nearby(package, names["spawn_mobs"])
    names["update_plants"] = _ripened(logic)
    return names["craftax_step"]


def craftax_view(package: str, *, fast: bool = True) -> Callable[[Any], jax.Array]:
    """The function from a world to Craftax's symbolic observation, f32 `[O]`."""
    renderer = importlib.import_module(f"{package}.renderer")
    if not fast or package != _CLASSIC:
        return renderer.render_craftax_symbolic
    names = _rebuilt(renderer, jax=_quick_jax(), jnp=_Overlay(jnp, pad=_Padded))
    return names["render_craftax_symbolic"]


def _on_one_floor(logic: Any) -> Callable[..., tuple[Any, jax.Array]]:
    """Full Craftax's `craftax_step`; from a change of floor until mobs appear it sees one floor.

    Leaves `[floors, …]` of the world have a length of 1 there, and the player's floor is 0. Chests
    and the boss depend on its true number.
    """

    def step(key: jax.Array, world: Any, action: jax.Array, *settings: Any) -> tuple[Any, Any]:
        names = _rebuilt(logic, jax=_Overlay(jax, random=_Overlay(jax.random, choice=choice)))
        whole, floors = world, settings[1].num_levels

        def per_floor(leaf: Any) -> bool:
            return jnp.shape(leaf)[:1] == (floors,)

        def parted(change_floor: Callable[..., Any], *arguments: Any) -> Any:
            nonlocal whole
            whole = change_floor(*arguments)
            floor = whole.player_level
            here = jax.tree.map(lambda leaf: leaf[floor][None] if per_floor(leaf) else leaf, whole)
            return here.replace(player_level=jnp.zeros_like(floor))

        def joined(spawn_mobs: Callable[..., Any], here: Any, *more: Any) -> Any:
            floor = whole.player_level
            state = jax.tree.map(
                lambda old, new: old.at[floor].set(new[0]) if per_floor(old) else new, whole, here
            )
            return spawn_mobs(state.replace(player_level=floor), *more)

        def opened(chest: Callable[..., Any], key: jax.Array, here: Any, *more: Any) -> Any:
            return chest(key, here.replace(player_level=whole.player_level), *more)

        names["change_floor"] = partial(parted, names["change_floor"])
        names["add_items_from_chest"] = partial(opened, names["add_items_from_chest"])
        names["spawn_mobs"] = partial(joined, names["spawn_mobs"])
        names["is_fighting_boss"] = lambda *_: whole.player_level == floors - 1
        names["update_plants"] = _ripened(logic)
        return names["craftax_step"](key, world, action, *settings)

    return step


def _quick_jax() -> Any:
    """jax with our loops, cuts and random numbers."""
    drawing = {"choice": choice, "split": split, "uniform": uniform, "randint": randint}
    lax = _Overlay(jax.lax, scan=scan, dynamic_slice=_cut)
    return _Overlay(jax, random=_Overlay(jax.random, **drawing), lax=lax)


def _rebuilt(module: Any, **others: Any) -> dict[str, Any]:
    """A module's names and `others`, with its functions rebuilt so as to use one another."""
    names = {**vars(module), **others}
    for name, value in vars(module).items():
        if isinstance(value, FunctionType) and value.__module__.startswith("craftax."):
            names[name] = _in(names, value)
    return names


def with_names(function: Any, **names: Any) -> Callable[..., Any]:
    """The same function, with other meanings for some of its module's names."""
    return _in({**function.__globals__, **names}, function)


def _in(names: dict[str, Any], function: FunctionType) -> Callable[..., Any]:
    return FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )


class _Padded(NamedTuple):
    """A map with a margin around it, which need not be made if only a view of it is wanted."""

    map: jax.Array
    margin: tuple[int, int]
    constant_values: Any


def _cut(operand: Any, start: Any, sizes: Sequence[int]) -> jax.Array:
    """`jax.lax.dynamic_slice`, also of a map with a margin."""
    if not isinstance(operand, _Padded):
        return jax.lax.dynamic_slice(operand, start, sizes)
    (before, after), (height, width) = operand.margin, operand.map.shape
    limits = np.array([height, width]) + before + after - np.array(sizes)
    corner = jnp.clip(start, 0, limits) - before
    return _part(operand.map, (), corner, sizes, beyond=operand.constant_values)


def _part(
    blocks: jax.Array,
    floor: tuple[Any, ...],
    corner: jax.Array,
    sizes: Sequence[int],
    *,
    beyond: Any,
) -> jax.Array:
    """The part of a map, or of one floor of several, from a corner on."""
    # Negative numbers would count from the other end.
    rows, columns = (
        jnp.where(index < 0, size, index)
        for index, size in zip(
            (corner[0] + np.arange(sizes[0]), corner[1] + np.arange(sizes[1])),
            blocks.shape[-2:],
            strict=True,
        )
    )
    return blocks.at[(*floor, rows[:, None], columns)].get(mode="fill", fill_value=beyond)


def scan(function: Callable[..., Any], init: Any, xs: Any, **settings: Any) -> tuple[Any, Any]:
    """`jax.lax.scan`; where nothing is carried on, all turns are taken at once."""
    if init is not None:
        return jax.lax.scan(function, init, xs, **settings)
    return None, jax.vmap(lambda x: function(None, x)[1])(xs)


def _ripened(logic: Any) -> Callable[..., Any]:
    """`update_plants`, which sets only the cells of plants that have ripened."""
    ripe = logic.BlockType.RIPE_PLANT.value

    def update_plants(state: Any, static_params: Any) -> Any:
        del static_params
        age = (state.growing_plants_age + 1) * state.growing_plants_mask
        rows, columns = state.growing_plants_positions.T
        rows = jnp.where(age >= _RIPE, rows, state.map.shape[-2])
        floor = (0,) * (state.map.ndim - 2)
        ripened = state.map.at[(*floor, rows, columns)].set(ripe, mode="drop")
        return state.replace(map=ripened, growing_plants_age=age)

    return update_plants


def _nearby(package: str, spawn_mobs: Callable[..., Any]) -> Callable[..., Any]:
    """`spawn_mobs`, shown only the part of the map in which mobs can appear.

    They appear nearer than `mob_despawn_distance`, and all that live are at most that far away:
    those that were not are gone by the time that it is called.
    """
    constants = importlib.import_module(f"{package}.constants")
    outside = constants.BlockType.OUT_OF_BOUNDS.value

    def spawn(state: Any, rng: jax.Array, params: Any, static_params: Any) -> Any:
        reach = params.mob_despawn_distance + 1
        side = 2 * reach + 1
        corner = state.player_position - reach
        floors = state.map.shape[:-2]
        floor = (state.player_level,) if floors else ()

        def seen(blocks: jax.Array, beyond: Any) -> jax.Array:
            part = _part(blocks, floor, corner, (side, side), beyond=beyond)
            return jnp.broadcast_to(part, (*floors, side, side))

        kinds = [kind for kind in _KINDS if hasattr(state, kind)]
        near = state.replace(
            map=seen(state.map, outside),
            mob_map=seen(state.mob_map, True),
            player_position=jnp.full_like(state.player_position, reach),
            **{kind: _moved(getattr(state, kind), -corner) for kind in kinds},
        )
        after = spawn_mobs(near, rng, params, static_params.replace(map_size=(side, side)))
        mobs = {kind: _moved(getattr(after, kind), corner) for kind in kinds}
        mob_map = state.mob_map
        for kind in kinds:
            here = (*floor, jnp.argmax(~getattr(state, kind).mask[floor]))
            place = (*floor, *mobs[kind].position[here])
            mob_map = mob_map.at[place].set(mob_map[place] | mobs[kind].mask[here])
        return state.replace(mob_map=mob_map, **mobs)

    return spawn


def _moved(mobs: Any, offset: jax.Array) -> Any:
    return mobs.replace(position=mobs.position + offset)


def choice(
    key: jax.Array, a: Any, *, shape: tuple[int, ...] = (), replace: bool = True, p: Any = None
) -> jax.Array:
    """`jax.random.choice` from `[N]` by the odds `[N]`; in two levels for the cells of a map."""
    side = math.isqrt(len(a)) if p is not None else 0
    if shape != (1,) or not replace or p is None or side**2 != len(a) or len(a) < _LEAST_CELLS:
        return choice_of_few(key, a, shape=shape, replace=replace, p=p)
    rows = p.reshape(side, side)
    up_to_row = jnp.cumsum(rows.sum(axis=1))
    drawn = up_to_row[-1] * (1 - uniform(key, shape))[0]
    row = jnp.minimum((up_to_row < drawn).sum(), side - 1)
    before = jnp.where(row > 0, up_to_row[row - 1], 0)
    up_to_cell = before + jnp.cumsum(rows[row])
    # The row's own sum may fall short of the drawn number by rounding: then its last cell.
    column = (up_to_cell < jnp.minimum(drawn, up_to_cell[-1])).sum()
    return a[side * row + column][None]


class _Overlay:
    """A module with some of its names replaced."""

    def __init__(self, under: Any, **over: Any) -> None:
        self._under = under
        self.__dict__.update(over)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._under, name)


def _is_plain_key(key: jax.Array) -> bool:
    """Return whether the key is of the kind whose splits and draws are written out here."""
    typed = jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key) and key.ndim == 0
    partitionable = jax.config.values["jax_threefry_partitionable"]
    return typed and partitionable and str(jax.random.key_impl(key)) == "threefry2x32"


def split(key: jax.Array, num: int = 2) -> jax.Array:
    """`jax.random.split` into N = `num` keys, `[N]`."""
    if not _is_plain_key(key) or num > _FEW:
        return jax.random.split(key, num)
    halves = jnp.stack(_threefry(jax.random.key_data(key), num), axis=-1)
    return jax.random.wrap_key_data(halves, impl=jax.random.key_impl(key))


def uniform(key: jax.Array, shape: tuple[int, ...] = (), **limits: Any) -> jax.Array:
    """`jax.random.uniform` of a few numbers from 0 to 1, float32 of shape `shape`."""
    if not _is_plain_key(key) or np.prod(shape) > _FEW or limits:
        return jax.random.uniform(key, shape, **limits)
    ones = jnp.uint32(0x3F800000)  # the bits of 1.0; the drawn ones become its fraction
    return jax.lax.bitcast_convert_type((_bits(key, shape) >> 9) | ones, jnp.float32) - 1


def randint(
    key: jax.Array, shape: tuple[int, ...], minval: Any, maxval: Any, **kind: Any
) -> jax.Array:
    """`jax.random.randint` of a few numbers within known limits, int32 of shape `shape`."""
    plain = isinstance(minval, int) and isinstance(maxval, int) and not kind
    if not _is_plain_key(key) or np.prod(shape) > _FEW or not plain or minval >= maxval:
        return jax.random.randint(key, shape, minval, maxval, **kind)
    high, low = (_bits(half, shape) for half in split(key))
    span = np.uint32(maxval - minval)
    with np.errstate(over="ignore"):
        factor = np.uint32(2**16) % span
        factor = (factor * factor) % span
    return jnp.int32(minval) + (((high % span) * factor + low % span) % span).astype(jnp.int32)


def choice_of_few(
    key: jax.Array, a: Any, *, shape: tuple[int, ...] = (), replace: bool = True, p: Any = None
) -> jax.Array:
    """`jax.random.choice` of one row of `a`, `[N, …]`, by the odds `p`, `[N]`."""
    if not _is_plain_key(key) or shape or not replace or len(a) > _FEW:
        return jax.random.choice(key, a, shape=shape, replace=replace, p=p)
    if p is None:
        return jnp.asarray(a)[randint(key, (), 0, len(a))]
    up_to = jnp.cumsum(p)
    drawn = up_to[-1] * (1 - uniform(key))
    return jnp.asarray(a)[(up_to < drawn).sum()]


def _bits(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """`jax.random.bits` of a few numbers, uint32 of shape `shape`."""
    count = int(np.prod(shape))
    high, low = _threefry(jax.random.key_data(key), count)
    return (high ^ low).reshape(shape)


@partial(jax.jit, static_argnums=1)
def _threefry(words: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The block cipher Threefry-2x32 in 20 rounds, of the numbers below `count`.

    Jitted, so that it is traced once and not for every draw.
    """
    first, second = words
    counts = np.arange(count, dtype=np.uint32)
    keys = (first, second, first ^ second ^ jnp.uint32(_PARITY))
    x0 = jnp.broadcast_to(keys[0], counts.shape)
    x1 = keys[1] + counts
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = x0 ^ ((x1 << rotation) | (x1 >> (32 - rotation)))
        x0 = x0 + keys[(group + 1) % 3]
        x1 = x1 + keys[(group + 2) % 3] + np.uint32(group + 1)
    return x0, x1
