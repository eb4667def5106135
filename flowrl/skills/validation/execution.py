"""The only place that executes skill code; alone because it imports JAX.

What is executed has passed the syntax check, or its author lifted that check for it. Its namespace
holds JAX, the game's enums and a few builtins, and nothing else.
"""

from __future__ import annotations

import ast
import builtins
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from flowrl.games.base import Game
from flowrl.skills.validation.allowed import CALLS, TRUSTED_CALLS

_BUILTINS = (*sorted(CALLS), "range")


def execute_functions(
    functions: Sequence[ast.FunctionDef], game: Game, *, place: str, trusted: bool = False
) -> list[Callable[..., Any]]:
    """The functions as callables, in one namespace; `place` is the file in their tracebacks."""
    namespace = _namespace(game, trusted=trusted)
    tree = ast.fix_missing_locations(ast.Module(body=[*functions], type_ignores=[]))
    exec(compile(tree, place, "exec", dont_inherit=True), namespace)  # noqa: S102 - see above
    return [namespace[function.name] for function in functions]


def _namespace(game: Game, *, trusted: bool) -> dict[str, Any]:
    known = (*_BUILTINS, *sorted(TRUSTED_CALLS)) if trusted else _BUILTINS
    namespace: dict[str, Any] = {"jax": jax, "jnp": jnp}
    if game.enums:
        with jax.ensure_compile_time_eval():  # its arrays outlive a trace that asks first
            constants = importlib.import_module(game.constants)
        namespace |= {name: getattr(constants, name) for name in game.enums}
    return namespace | {"__builtins__": {name: getattr(builtins, name) for name in known}}
