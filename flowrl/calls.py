"""Arguments of Python calls, read as flags are; alone, because several rooms use it.

They stand apart from command lines: `load_agent`, say, has arguments and no flags.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, get_type_hints

from flowrl.errors import ConfigError
from flowrl.paths import given_path
from flowrl.storage import records

P = ParamSpec("P")
Returned = TypeVar("Returned")


def by_annotation(place: str) -> Callable[[Callable[P, Returned]], Callable[P, Returned]]:
    """Let a Python function read each of its arguments by its annotation, as a flag's value is.

    A path may begin with `~`. ConfigError names the `place` and the argument.
    """

    def decorated(function: Callable[P, Returned]) -> Callable[P, Returned]:
        @functools.wraps(function)
        def reading(*args: P.args, **named: P.kwargs) -> Returned:
            hints = get_type_hints(function, include_extras=True)
            try:
                call = inspect.signature(function).bind(*args, **named)
            except TypeError as error:
                known = inspect.signature(function).parameters.items()
                takes = (f"{word}=…" if by.kind == by.KEYWORD_ONLY else word for word, by in known)
                words = ", ".join(word for word in takes if word != "self")
                raise TypeError(f"{place}: {error}; it takes {words}") from None
            for name in call.arguments.keys() & hints.keys():
                said = f"{place}: {name}"
                call.arguments[name] = value_given(said, hints[name], call.arguments[name])
            return function(*call.args, **call.kwargs)

        return reading

    return decorated


def value_given(place: str, kind: Any, value: Any) -> Any:
    """Return the value that a Python call was given for an argument; ConfigError says the place."""
    if not isinstance(value, bool):
        with suppress(TypeError):
            value = operator.index(value)  # NumPy's whole numbers, too
    if kind == str | int:
        kind = int if type(value) is int else str
    try:
        return given_path(value) if kind == str | Path else records.from_json(kind, value)
    except (ConfigError, records.MalformedError) as error:
        raise ConfigError(f"{place} {error}") from None
