"""The seam of `flowrl facts`: a game that can be probed; alone, as games and prober share it.

A dial is one number that decides how a built world begins, such as a piece of wood or a floor. The
prober lowers and raises dials, steps, and compares what it measures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol


class Dial(NamedTuple):
    """The least, the usual and the most of a dial; where two are equal, only places change it."""

    least: int
    usual: int
    most: int


class Place(NamedTuple):
    """Dials that differ from the usual, what stands ahead there, and what is done: () is all."""

    dials: Mapping[str, int]
    ahead: tuple[str, ...]
    actions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Facts that are read and not probed; of each row, the first cell is its name."""

    title: str
    source: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = field(default=())


class Probes(Protocol):
    """A game that can be probed; `world`, `step` and `measure` are pure and are jitted."""

    actions: tuple[str, ...]
    """The names of the actions, by their number."""
    idle: str
    """The action that does nothing: what it changes, time changes."""
    ahead: tuple[str, ...]
    """The names of what can stand ahead of the player, by their number."""
    free: str
    """The one of them that stands for nothing."""
    dials: Mapping[str, Dial]
    names: Mapping[str, tuple[str, ...]]
    """Of dials that are no amounts, the names of their values."""
    places: tuple[Place, ...]
    """Where every action is tried, the richest first."""
    unprobed: Mapping[str, str]
    """What is not probed, and the reason."""

    @property
    def floors(self) -> Mapping[str, tuple[int, ...]]:
        """Of what can stand ahead, the floors where it is, as far as they are known."""
        ...

    def world(self, dials: Mapping[str, Any], ahead: Any, key: Any) -> Any:
        """The world of these dials, int32[] each, with the thing of this number ahead."""
        ...

    def step(self, key: Any, world: Any, action: Any) -> Any:
        """The world after an action, int32[]."""
        ...

    def measure(self, world: Any) -> tuple[Mapping[str, Any], Any, Mapping[str, Any]]:
        """Amounts by name, the number of the block ahead, and achievements by name."""
        ...

    def tables(self) -> tuple[Table, ...]:
        """Facts that are read from the game's modules."""
        ...
