"""The gate's third part: whether a game has the blocks, actions and items that skill code names."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from flowrl.errors import GateError
from flowrl.skills.games import ENUMS, GAMES, ITEMS, GameTable
from flowrl.skills.refusals import refusal

_INVENTORIES = ("inventory", "inventory_diff")


class _Missing(NamedTuple):
    """A name that a game does not have."""

    node: ast.AST
    owner: str  # BlockType, inventory …
    name: str
    there_are: Collection[str]


def check_names(
    functions: Iterable[ast.FunctionDef], place: str, *, env_name: str | None = None
) -> None:
    """Refuse names that `env_name` does not have; without it, those that no one game has all of.

    Raises:
      GateError: with the line, the name and the ones that come closest to it.
    """
    nodes = [node for function in functions for node in ast.walk(function)]
    games = [GAMES[env_name]] if env_name is not None else list(GAMES.values())
    missing = [list(_missing(nodes, game)) for game in games]
    if all(missing):
        raise _refused([names[0] for names in missing], games, place)


def closest(name: str, names: Iterable[str]) -> str:
    """The remedy for a misspelt name: those that come closest to it."""
    close = difflib.get_close_matches(name, sorted(names), n=3, cutoff=0.5)
    return f"closest are {', '.join(close)}" if close else f"there are {', '.join(sorted(names))}"


def _missing(nodes: Iterable[ast.AST], game: GameTable) -> Iterator[_Missing]:
    for node in nodes:
        match node:
            case ast.Attribute(value=ast.Name(id=owner), attr=name) if owner in ENUMS:
                if name not in game.members[owner]:
                    yield _Missing(node, owner, name, game.members[owner])
            case ast.Attribute(value=value, attr=name) if _is_item(value, name):
                if name not in game.items:
                    yield _Missing(node, ast.unparse(value)[:40], name, game.items)


def _is_item(value: ast.expr, name: str) -> bool:
    """Whether this is an item of the inventory, which may have been given another name."""
    return name in ITEMS or (isinstance(value, ast.Name) and value.id in _INVENTORIES)


def _refused(missing: Sequence[_Missing], games: Sequence[GameTable], place: str) -> GateError:
    """The error for what each of the games is the first to lack."""
    first = missing[-1]
    if len({(name.owner, name.name) for name in missing}) == 1:
        where = games[0].env_name if len(games) == 1 else "either game"
        what = f"{first.owner}.{first.name} is not in {where}"
        return refusal(place, first.node, what, closest(first.name, first.there_are))
    lacks = (
        f"{game.env_name} has no {name.owner}.{name.name}"
        for game, name in zip(games, missing, strict=True)
    )
    return refusal(place, first.node, " and ".join(lacks), "use the names of one game only")
