"""Facts of a game as plain data; alone, because probing, pages and remarks share it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flowrl.games.probes import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The least and the most of a dial at which an effect occurs; None is no bound."""

    least: int | None = None
    most: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The least and the most that an amount changes by, and the chance that it does."""

    least: float
    most: float
    chance: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The effect of an action, and its needs."""

    action: str
    ahead: tuple[str, ...]
    """What may stand ahead; empty is anything."""
    needs: Mapping[str, Bound]
    changes: Mapping[str, Change]
    becomes: str | None
    """What is ahead afterwards, if that changes."""
    achievements: Mapping[str, float]
    """Name → chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All facts of a game."""

    game: str
    recipes: tuple[Recipe, ...]
    tables: tuple[Table, ...]
    unprobed: Mapping[str, str]
    """What is not probed, and the reason."""
    names: Mapping[str, tuple[str, ...]]
    """Of needs that are no amounts, the names of their values."""
    floors: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Of what stands ahead, the floors where it is; what is not named may be on any."""
