"""The gate: skill code is hostile until every node of its syntax tree is one that we admit.

Nothing is executed here. What passes is a file of constants and two functions over the injected
features, which reach neither files nor processes nor anything of Python but arithmetic.

Bounded are the text, its nodes and depth, each literal and exponent, the rounds of loops, whole
numbers however they are computed, and the arrays whose shape is written out. How large arrays grow
by computing, what the functions return and whether they can be computed at all is found out by the
trial (`flowrl.envs.trial`), in a process with limits.
"""

from __future__ import annotations

import ast
import warnings
from typing import Any

from flowrl.errors import GateError
from flowrl.skills.admitted import INJECTED
from flowrl.skills.gate_body import check_body
from flowrl.skills.gate_growth import check_growth
from flowrl.skills.gate_names import check_names
from flowrl.skills.refusals import refusal

__all__ = [
    "INJECTED",
    "check_function",
    "check_names",
    "check_skill_source",
    "literal",
    "parse_source",
]

SOURCE_LIMIT_BYTES = 20_000
NODE_LIMIT = 4_000
DEPTH_LIMIT = 60
COUNT_LIMIT = 1_000

CONSTANTS = (
    *("name", "description", "requirements", "consumption", "gain", "ephemeral"),
    "max_steps",
)
FUNCTION_NAMES = ("task_is_done", "task_reward")


def check_skill_source(
    text: str, place: str, *, env_name: str | None = None, trusted: bool = False
) -> ast.Module:
    """The syntax tree of a skill file that passes the gate.

    What it names must be in the game `env_name`, or, without one, in one of the games. The bodies
    of a trusted file's functions are not looked at.

    Raises:
      GateError: the text is not a skill file, or asks for what the gate does not admit.
    """
    module = parse_source(text, place)
    seen: set[str] = set()
    for index, node in enumerate(module.body):
        name = _top_level_name(node, place, first=index == 0)
        if name in seen:
            raise refusal(place, node, f"{name} appears twice", "keep one of them")
        seen.add(name)
        if isinstance(node, ast.FunctionDef):
            check_function(node, place, trusted=trusted)
        elif isinstance(node, ast.Assign):
            literal(node.value, place)
    for missing in sorted({"name", "gain", *FUNCTION_NAMES} - seen):
        raise refusal(place, None, f"{missing} is missing", "a skill file must define it")
    functions = [node for node in module.body if isinstance(node, ast.FunctionDef)]
    check_names(functions, place, env_name=env_name)
    return module


def check_function(node: ast.FunctionDef, place: str, *, trusted: bool = False) -> None:
    """Refuse a function unless all it does is arithmetic over the injected features.

    Of a trusted one only the signature is looked at.

    Raises:
      GateError: with the place and the remedy.
    """
    parameters = _check_signature(node, place)
    if trusted:
        return
    documented = ast.get_docstring(node, clean=False) is not None
    body = node.body[1:] if documented else node.body
    check_body(body, parameters=parameters, place=place)
    check_growth(body, parameters=parameters, place=place)


def literal(node: ast.expr, place: str) -> Any:
    """The value of a literal: text, numbers, and dicts, lists, tuples and sets of them.

    Raises:
      GateError: the expression is not a literal.
    """
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError, MemoryError) as error:
        raise refusal(place, node, "a constant is not a literal", "write it out") from error


def parse_source(text: str, place: str, *, limit_bytes: int = SOURCE_LIMIT_BYTES) -> ast.Module:
    """The syntax tree of a bounded text: `limit_bytes`, nodes in proportion, 60 levels deep.

    Raises:
      GateError: the text is too long, too deep or not Python.
    """
    size = len(text.encode(errors="replace"))
    if size > limit_bytes:
        raise refusal(place, None, f"{size} bytes are over {limit_bytes}", "make the code smaller")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = ast.parse(text)
    except SyntaxError as error:
        raise GateError(f"{place}:{error.lineno or 1}: {error.msg}; correct the syntax") from error
    except (ValueError, RecursionError, MemoryError) as error:
        what = "the text is not readable as Python"
        raise refusal(place, None, what, "make the code simpler") from error
    _check_size(module, place, limit_nodes=NODE_LIMIT * max(1, limit_bytes // SOURCE_LIMIT_BYTES))
    return module


def _check_size(module: ast.Module, place: str, *, limit_nodes: int) -> None:
    level: list[ast.AST] = [module]
    nodes = depth = 0
    while level:
        nodes, depth = nodes + len(level), depth + 1
        if nodes > limit_nodes or depth > DEPTH_LIMIT:
            what = f"over {limit_nodes} nodes or {DEPTH_LIMIT} levels of syntax"
            raise refusal(place, level[0], what, "make the code simpler")
        level = [child for node in level for child in ast.iter_child_nodes(node)]


def _top_level_name(node: ast.stmt, place: str, *, first: bool) -> str:
    match node:
        case ast.FunctionDef(name=name) if name in FUNCTION_NAMES:
            return name
        case ast.Assign(targets=[ast.Name(id=name)]) if name in CONSTANTS:
            return name
        case ast.Expr(value=ast.Constant(value=str())) if first:
            return "docstring"
    what = f"{type(node).__name__} does not belong in a skill file"
    remedy = f"define only {', '.join((*CONSTANTS, *FUNCTION_NAMES))}"
    raise refusal(place, node, what, remedy)


def _check_signature(node: ast.FunctionDef, place: str) -> frozenset[str]:
    given = node.args
    special = given.vararg or given.kwarg or given.kwonlyargs or given.posonlyargs
    annotated = node.returns or any(parameter.annotation for parameter in given.args)
    if special or annotated or node.decorator_list or getattr(node, "type_params", None):
        what = f"{node.name} has decorators, annotations or special parameters"
        raise refusal(place, node, what, "write plain parameters only")
    names = [parameter.arg for parameter in given.args]
    for name in names:
        if name not in INJECTED:
            what = f"{node.name} asks for {name!r}, which is not a feature"
            raise refusal(place, node, what, f"choose among {', '.join(INJECTED)}")
    if len(set(names)) < len(names):
        raise refusal(place, node, f"{node.name} asks for a feature twice", "ask for it once")
    _check_defaults(node, names, place)
    return frozenset(names)


def _check_defaults(node: ast.FunctionDef, names: list[str], place: str) -> None:
    match node.args.defaults:
        case []:
            return
        case [ast.Constant(value=count)] if type(count) is int and 0 < count <= COUNT_LIMIT:
            if names[-1] == "n":
                return
    raise refusal(place, node, "a parameter has a default", "only n may have one, a number")
