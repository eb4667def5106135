"""Craftax's step with a faster way to choose the cell where a mob appears.

Most of a Craftax step goes into `spawn_mobs`, which calls `jax.random.choice` with a probability
for each cell of the map, three times: a running sum over thousands of cells, slow on CPUs. Summing
rows first and then one row alone finds the same cell from the same random number (but for
rounding where two cells meet, about once in a hundred thousand draws).

Nothing of Craftax or jax is changed: its step is rebuilt here from its own code, with only the
names `spawn_mobs` and, within that, `jax` standing for ours.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from types import FunctionType
from typing import Any

import jax
import jax.numpy as jnp

LEAST_CELLS = 1024  # below, the plain choice is as fast


def craftax_step(package: str, *, fast_choice: bool = True) -> Callable[..., tuple[Any, Any]]:
    """The `craftax_step(key, world, action, params, static_params)` of a Craftax package."""
    logic = importlib.import_module(f"{package}.game_logic")
    if not fast_choice:
        return logic.craftax_step
    random = _Overlay(jax.random, choice=choice)
    spawn_mobs = _rebound(logic.spawn_mobs, jax=_Overlay(jax, random=random))
    return _rebound(logic.craftax_step, spawn_mobs=spawn_mobs)


def choice(
    key: jax.Array, a: Any, *, shape: tuple[int, ...] = (), replace: bool = True, p: Any = None
) -> jax.Array:
    """`jax.random.choice`, in two levels for one draw from a square map's cells."""
    side = math.isqrt(len(a)) if p is not None else 0
    if shape != (1,) or not replace or p is None or side**2 != len(a) or len(a) < LEAST_CELLS:
        return jax.random.choice(key, a, shape=shape, replace=replace, p=p)
    rows = p.reshape(side, side)
    up_to_row = jnp.cumsum(rows.sum(axis=1))
    drawn = up_to_row[-1] * (1 - jax.random.uniform(key, shape, dtype=p.dtype))[0]
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


def _rebound(function: Any, **names: Any) -> Callable[..., Any]:
    """The same function, with other meanings for some of its module's names."""
    module_names = {**function.__globals__, **names}
    return FunctionType(
        function.__code__,
        module_names,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
