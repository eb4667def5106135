"""What skill code may name: JAX's functions as tables, and the words of the games."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from flowrl.errors import CodeRefusedError
from flowrl.games.base import COUNT, INVENTORIES, Game, known_games

MODULES = frozenset({"jnp", "jax"})
CALLS = frozenset({"abs", "min", "max", "len", "float", "int", "bool"})
# Builtins that a trusted skill's functions have besides: all but those that reach further.
_TRUSTED_CALLS = """
all any dict divmod enumerate filter isinstance list map pow reversed round set slice sorted
str sum tuple zip ArithmeticError AssertionError IndexError KeyError TypeError ValueError
"""
TRUSTED_CALLS = frozenset(_TRUSTED_CALLS.split())

_ELEMENTWISE = """
abs absolute add ceil clip cos divide equal exp expm1 floor floor_divide greater greater_equal
hypot isclose isfinite isinf isnan less less_equal log log1p log2 logical_and logical_not
logical_or logical_xor maximum minimum mod multiply nan_to_num negative not_equal reciprocal
remainder round select sign sin sqrt square subtract tan tanh true_divide where
ones_like zeros_like full_like
"""
_REDUCE = "all any argmax argmin count_nonzero dot max mean median min prod std sum var"
_SHAPE = """
arange array asarray concatenate cumsum diff expand_dims full ones ravel reshape
sort squeeze stack take transpose zeros
"""
# These make an array of a size that is written in the code, so that size must be small.
MAKERS = frozenset(f"jnp.{word}" for word in ("arange", "full", "ones", "zeros"))
_LAX = "abs clamp exp log max min select sign sqrt square stop_gradient tanh"
_NN = "relu sigmoid silu softplus tanh"

FUNCTIONS = frozenset(
    {f"jnp.{word}" for words in (_ELEMENTWISE, _REDUCE, _SHAPE) for word in words.split()}
    | {f"jnp.{word}" for word in ("float32", "int32", "bool_", "linalg.norm")}
    | {f"jax.lax.{word}" for word in _LAX.split()}
    | {f"jax.nn.{word}" for word in _NN.split()}
)
VALUES = frozenset(
    f"jnp.{word}" for word in ("inf", "nan", "pi", "e", "float32", "int32", "bool_", "newaxis")
)

_METHODS = """
sum max min mean any all prod astype clip argmax argmin set add
"""
METHODS = frozenset(_METHODS.split())
ATTRIBUTES = frozenset({"at", "ndim", "size", "T"})  # besides the items of the games
_OF_ARRAYS = ATTRIBUTES | METHODS | {"value"}


def refusal(place: str, node: ast.AST | None, what: str, remedy: str) -> CodeRefusedError:
    """The error for a node: its line, what is wrong with it, and the remedy."""
    return CodeRefusedError(f"{place}:{getattr(node, 'lineno', 1)}: {what}; {remedy}")


def feature_names() -> list[str]:
    """What skill functions may ask for in some installed game: the count n and the features."""
    return list(dict.fromkeys([COUNT, *(name for game in known_games() for name in game.features)]))


def enum_names() -> frozenset[str]:
    """The enums of all installed games."""
    return frozenset().union(*(game.enums for game in known_games()))


def item_names() -> frozenset[str]:
    """The items of all installed games."""
    return frozenset().union(*(game.items for game in known_games()))


class _Missing(NamedTuple):
    """A name that a game does not have."""

    node: ast.AST
    name: str
    there_are: Collection[str]


def check_names(functions: Iterable[ast.FunctionDef], place: str, *, games: Sequence[Game]) -> None:
    """Refuse functions unless one of the games has all that they name.

    Raises:
      CodeRefusedError: with the line, the name and the ones that come closest to it.
    """
    missing = _missing_names(functions, games)
    if all(missing):
        raise _refused([names[0] for names in missing], games, place)


def fitting_games(functions: Iterable[ast.FunctionDef], games: Sequence[Game]) -> list[Game]:
    """Those of the games that have all that the functions name."""
    missing = _missing_names(functions, games)
    return [game for game, names in zip(games, missing, strict=True) if not names]


def _missing_names(
    functions: Iterable[ast.FunctionDef], games: Sequence[Game]
) -> list[list[_Missing]]:
    """What each of the games lacks."""
    functions = list(functions)
    parameters = [parameter for function in functions for parameter in function.args.args]
    bodies = [node for function in functions for part in function.body for node in ast.walk(part)]
    enums, items = enum_names(), item_names()
    return [
        [*_missing_features(parameters, game), *_missing(bodies, game, enums, items)]
        for game in games
    ]


def _missing_features(parameters: Iterable[ast.arg], game: Game) -> Iterator[_Missing]:
    for parameter in parameters:
        if parameter.arg != COUNT and parameter.arg not in game.features:
            yield _Missing(parameter, parameter.arg, game.features)


def _missing(
    nodes: Iterable[ast.AST], game: Game, enums: Collection[str], items: Collection[str]
) -> Iterator[_Missing]:
    for node in nodes:
        match node:
            case ast.Attribute(value=ast.Name(id=owner), attr=name) if owner in enums:
                members = game.enums.get(owner, frozenset())
                if name not in members:
                    yield _Missing(node, f"{owner}.{name}", members)
            case ast.Attribute(value=value, attr=name) if _is_item(value, name, items):
                if name not in game.items:
                    yield _Missing(node, f"{ast.unparse(value)[:40]}.{name}", game.items)


def _is_item(value: ast.expr, name: str, items: Collection[str]) -> bool:
    """Whether this is an item of the inventory, which may have been given another name.

    Another game's item may have the name of a JAX function or of an array's attribute.
    """
    if isinstance(value, ast.Name) and value.id in INVENTORIES:
        return True
    while isinstance(value, ast.Attribute):
        value = value.value
    in_module = isinstance(value, ast.Name) and value.id in MODULES
    return name in items and name not in _OF_ARRAYS and not in_module


def _refused(missing: Sequence[_Missing], games: Sequence[Game], place: str) -> CodeRefusedError:
    """The error for the first name that each of the games lacks."""
    first = missing[-1]
    if len({each.name for each in missing}) == 1:
        where = games[0].name if len(games) == 1 else "any game"
        what = f"{first.name} is not in {where}"
        return refusal(place, first.node, what, _closest(first))
    lacks = (f"{game.name} has no {each.name}" for game, each in zip(games, missing, strict=True))
    return refusal(place, first.node, " and ".join(lacks), "use the names of one game only")


def _closest(missing: _Missing) -> str:
    """The remedy for a misspelt name: those that come closest to it."""
    last = missing.name.rpartition(".")[2]
    close = difflib.get_close_matches(last, sorted(missing.there_are), n=3, cutoff=0.5)
    names = ", ".join(close or sorted(missing.there_are))
    return f"closest are {names}" if close else f"there are {names}"
