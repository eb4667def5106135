"""Tables of Craftax's modules, for `flowrl facts`: floors, mobs, limits and enums."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from flowrl.games.probes import Table

PARTS = 10_000  # of a chance, as a whole number
# Settings of the generators of full Craftax, in the rows of the map that `stand_in` makes.
SETTINGS = (
    ("default_block", "sea_block", "coast_block", "mountain_block", "path_block", "tree", "lava"),
    ("ores",),
    ("ore_chances",),
    ("special_block", "fountain_block", "rare_path_replacement_block"),
)
_KINDS = ("passive", "melee", "ranged")
_LEFT_OUT = ("fractal_noise_angles", "god_mode", "max_timesteps", "always_diamond")
_LIMITS = ("MONSTERS_KILLED_TO_CLEAR_LEVEL", "BOSS_FIGHT_EXTRA_DAMAGE", "BOSS_FIGHT_SPAWN_TURNS")


def enums(constants: Any, names: Iterable[str]) -> Table:
    """Return the members of the enums of a package, as the game spells them."""
    rows = []
    for name in names:
        members = (f"{member.name} {member.value}" for member in getattr(constants, name))
        rows.append((name, ", ".join(members)))
    return Table(
        title="Enums", source=constants.__name__, columns=("enum", "members"), rows=tuple(rows)
    )


def limits(constants: Any, params: Mapping[str, Any]) -> Table:
    """Return the numbers that bound a game: its constants and parameters."""
    found = {name: getattr(constants, name) for name in _LIMITS if hasattr(constants, name)}
    rows = tuple(
        (name.lower(), str(value))
        for name, value in {**found, **params}.items()
        if isinstance(value, int | float | tuple) and name not in _LEFT_OUT
    )
    return Table(title="Limits", source=constants.__name__, columns=("name", "value"), rows=rows)


def floors_of(
    constants: Any, named: Sequence[tuple[str, int, int]], rows_of: Any
) -> dict[str, tuple[int, ...]]:
    """Return the floors of the mobs and blocks of full Craftax, of the maps of `stand_in`."""
    found = {name: tuple(_mob_floors(constants, kind, number)) for name, kind, number in named}
    for number, (made, ores) in enumerate(_contents(constants, rows_of)):
        for name in made | ores.keys():
            found[name] = (*found.get(name, ()), number)
    return found


def _mob_floors(constants: Any, kind: int, number: int) -> list[int]:
    floors = np.asarray(constants.FLOOR_MOB_MAPPING)
    return np.flatnonzero(floors[:, kind] == number).tolist()


def mobs(constants: Any, named: Sequence[tuple[str, int, int]]) -> Table:
    """Return floors, health, damage and defence of the mobs of full Craftax."""
    health = np.asarray(constants.MOB_TYPE_HEALTH_MAPPING)
    damage = np.asarray(constants.MOB_TYPE_DAMAGE_MAPPING)
    defence = np.asarray(constants.MOB_TYPE_DEFENSE_MAPPING)
    shots = np.asarray(constants.RANGED_MOB_TYPE_TO_PROJECTILE_TYPE_MAPPING)
    rows = []
    for name, kind, number in named:
        hurts = damage[number, 1] if kind == 1 else damage[shots[number], 3]
        rows.append(
            (
                name,
                _KINDS[kind],
                " ".join(map(str, _mob_floors(constants, kind, number))),
                f"{health[number, kind]:g}",
                "" if kind == 0 else _three(hurts),
                _three(defence[number, kind]),
            )
        )
    return Table(
        title="Mobs",
        source=constants.__name__,
        columns=("mob", "kind", "floors", "health", "damage", "defence"),
        rows=tuple(rows),
        notes=(
            "Damage and defence are physical, fire and ice; a defence is the share that is lost.",
        ),
    )


def _three(values: Any) -> str:
    return " ".join(f"{value:g}" for value in values)


def floors(constants: Any, names: Sequence[str], rows_of: Any) -> Table:
    """Return what the generators of full Craftax put on each floor, of the maps of `stand_in`."""
    rows = []
    contents = zip(names, _contents(constants, rows_of), strict=True)
    for number, (name, (made, ores)) in enumerate(contents):
        some = ", ".join(f"{ore} {chance:.2%}" for ore, chance in ores.items())
        rows.append((f"{number} {name}", ", ".join(sorted(made)), some))
    return Table(
        title="Floors",
        source="craftax.craftax.world_gen.world_gen_configs",
        columns=("floor", "blocks of its settings", "ores, chance a stone"),
        rows=tuple(rows),
    )


def _contents(constants: Any, rows_of: Any) -> list[tuple[set[str], dict[str, float]]]:
    """The blocks of each floor, and the chances of its ores."""
    block = {each.value: each.name for each in constants.BlockType}
    return [
        (
            {block[value] for row in (0, 3) for value in found[row] if value > 1},
            {block[v]: share / PARTS for v, share in zip(*found[1:3], strict=True) if share},
        )
        for found in np.asarray(rows_of)
    ]
