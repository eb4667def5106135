"""The only place that executes skill code; alone because it imports JAX.

What is executed has passed the syntax check, or its author lifted that check for it. Its namespace
holds JAX, the game's enums and a few builtins, and nothing else. Text in code that
passed, the keys of dicts, is replaced by numbers before it runs: so nothing can be formatted.
"""

from __future__ import annotations

import ast
import builtins
import copy
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from flowrl.games.base import Game
from flowrl.skills.validation.allowed import CALLS, NUMBER_LIMIT, TRUSTED_CALLS

_BUILTINS = (*sorted(CALLS), "range")


def execute_functions(
    functions: Sequence[ast.FunctionDef], game: Game, *, place: str, trusted: bool = False
) -> list[Callable[..., Any]]:
    """The functions as callables, in one namespace; `place` is the file in their tracebacks."""
    namespace = _namespace(game, trusted=trusted)
    if not trusted:
        functions = [_Numbered().visit(copy.deepcopy(function)) for function in functions]
    tree = ast.fix_missing_locations(ast.Module(body=[*functions], type_ignores=[]))
    exec(compile(tree, place, "exec", dont_inherit=True), namespace)  # noqa: S102 - see above
    return [namespace[function.name] for function in functions]


class _Numbered(ast.NodeTransformer):
    """Replaces each text of a function by a number of its own, in the order of the code."""

    def __init__(self) -> None:
        self._texts: dict[str, int] = {}

    def visit_Expr(self, node: ast.Expr) -> ast.Expr:
        return node  # a docstring, which is not part of the code's digest

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        if not isinstance(node.value, str):
            return node
        number = self._texts.setdefault(node.value, NUMBER_LIMIT + 1 + len(self._texts))
        return ast.copy_location(ast.Constant(number), node)


def _namespace(game: Game, *, trusted: bool) -> dict[str, Any]:
    known = (*_BUILTINS, *sorted(TRUSTED_CALLS)) if trusted else _BUILTINS
    namespace: dict[str, Any] = {"jax": jax, "jnp": jnp}
    if game.enums:
        with jax.ensure_compile_time_eval():  # its arrays outlive a trace that asks first
            constants = importlib.import_module(game.constants)
        namespace |= {name: getattr(constants, name) for name in game.enums}
    return namespace | {"__builtins__": {name: getattr(builtins, name) for name in known}}
