"""The syntax check: skill code is refused unless every node of its syntax tree is admitted.

Nothing is executed here. What passes is a file of constants and two functions over the features of
a game, which reach neither files nor processes nor anything of Python but arithmetic. The check
says what code may reach; what it costs, and what it returns, is measured by the dry run, in a
process with limits.

Helper functions and named constants of a file are moved into the functions that use them, so that
a skill is two functions wherever it goes. A helper may call only those above it: nothing recurs.
Annotations and the imports of jax are dropped, and are never executed.
"""

from __future__ import annotations

import ast
import copy
import difflib
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from flowrl.errors import CodeRefusedError
from flowrl.games.base import COUNT, Game
from flowrl.skills.validation.allowed import (
    FUNCTION_NAMES,
    INSTEAD,
    first_problem,
    is_plain,
    names_in,
    parameters,
    position,
    python_word,
)

SOURCE_LIMIT_BYTES = 20_000
_NODE_LIMIT = 4_000
_DEPTH_LIMIT = 60
_NUMBER_BITS = 64  # of any whole number: Python may refuse to write or to divide larger ones

CONSTANTS = (
    *("name", "description", "requirements", "consumption", "gain", "ephemeral"),
    *("floors", "max_count", "max_steps", "provided_by", "like", "training"),
)
_IMPORTS = ("import jax", "import jax.numpy as jnp", "from __future__ import annotations")

_DOCSTRING = "the docstring"
_ANNOTATIONS = (
    *(ast.Name, ast.Attribute, ast.Subscript, ast.Tuple, ast.Constant, ast.Load),
    *(ast.BinOp, ast.BitOr),
)
_Tree = TypeVar("_Tree", bound=ast.AST)


def check_skill_source(
    text: str, place: str, *, games: Sequence[Game], trusted: bool = False
) -> ast.Module:
    """The syntax tree of a skill file that is admitted; raises CodeRefusedError for another.

    One of the games must have all that it names. The bodies of a trusted file's functions are not
    looked at.
    """
    module = parse_source(text, place)
    known: dict[str, ast.stmt] = {}
    for index, node in enumerate(part for line in module.body for part in _single(line)):
        if isinstance(node, ast.Import | ast.ImportFrom) and ast.unparse(node) in _IMPORTS:
            continue
        name = _top_level_name(node, place, first=index == 0)
        if name in known:
            raise _refusal(place, node, f"{name} appears twice", "keep one of them")
        known[name] = node
        if isinstance(node, ast.Assign) and name in CONSTANTS:
            literal(node.value, place)
    for missing in sorted({"name", "gain", *FUNCTION_NAMES} - known.keys()):
        raise _refusal(place, None, f"{missing} is missing", "a skill file must define it")
    functions = _composed(known, place, games)
    if not fitting_games(functions, games, trusted=trusted):
        # Of the game that has most of what the file names.
        problems = (first_problem(functions, game, trusted=trusted) for game in games)
        last_problem = max(filter(None, problems), key=lambda problem: position(problem[0]))
        raise _refusal(place, *last_problem)
    rest = [node for name, node in known.items() if name in (_DOCSTRING, *CONSTANTS)]
    admitted = ast.Module(body=[*rest, *functions], type_ignores=[])
    if functions != [known[name] for name in FUNCTION_NAMES]:  # so long it is when it is recorded
        parse_source(ast.unparse(admitted), place, limit_bytes=SOURCE_LIMIT_BYTES)
    return admitted


def _composed(
    known: Mapping[str, ast.stmt], place: str, games: Sequence[Game]
) -> list[ast.FunctionDef]:
    """The two functions, with the helpers and named constants moved into them that they use.

    `known` is what the file defines, by name, in its order.
    """
    own = (_DOCSTRING, *CONSTANTS, *FUNCTION_NAMES)
    shared = {name: node for name, node in known.items() if name not in own}
    for name in shared.keys() & {COUNT}.union(*(game.features for game in games)):
        what = f"{name} is the name of a feature"
        raise _refusal(place, shared[name], what, "choose another name")
    unused, composed = dict(shared), []
    for function in (known[name] for name in FUNCTION_NAMES):
        assert isinstance(function, ast.FunctionDef)
        for name in shared.keys() & (names_in(function, ast.Store) | parameters(function)):
            what = f"{function.name} gives {name} another meaning"
            raise _refusal(place, function, what, "choose another name")
        words, used = names_in(function, ast.Load), set[str]()
        while new := (words & shared.keys()) - used:
            used |= new
            words = words.union(*(names_in(shared[name], ast.Load) for name in new))
        unused = {name: node for name, node in unused.items() if name not in used}
        parts = [node for name, node in shared.items() if name in used]
        composed.append(_with(function, parts) if parts else function)
    for name, node in unused.items():
        close = difflib.get_close_matches(name, CONSTANTS, n=1)
        remedy = f"did you mean {close[0]}?" if close else "remove it, or correct its name"
        raise _refusal(place, node, f"{name} is used by neither function", remedy)
    return composed


def _with(function: ast.FunctionDef, used: Sequence[ast.stmt]) -> ast.FunctionDef:
    """The function with statements before its own; it is no piece of the file's text any more."""
    documented = ast.get_docstring(function, clean=False) is not None
    longer = copy.copy(function)
    longer.body = [*function.body[:documented], *used, *function.body[documented:]]
    longer.end_lineno = None
    return longer


def fitting_games(
    functions: Iterable[ast.FunctionDef], games: Iterable[Game], *, trusted: bool = False
) -> list[Game]:
    """Those of the games for which the functions pass the check."""
    functions = list(functions)
    return [game for game in games if not first_problem(functions, game, trusted=trusted)]


def check_function(node: ast.FunctionDef, place: str, *, game: Game, trusted: bool = False) -> None:
    """Refuse a function unless all it does is arithmetic over the features of a game.

    Of a trusted function only the signature is looked at.
    """
    problem = first_problem([node], game, trusted=trusted)
    if problem is not None:
        raise _refusal(place, *problem)


def literal(node: ast.expr, place: str) -> Any:
    """The value of a literal: text, numbers, and dicts, lists, tuples and sets of them."""
    for part in ast.walk(node):
        keys = [ast.unparse(key) for key in part.keys if key] if isinstance(part, ast.Dict) else []
        if twice := next((key for key in keys if keys.count(key) > 1), None):
            raise _refusal(place, part, f"{twice} stands twice", "leave one of them out")
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, ArithmeticError, RecursionError, MemoryError) as error:
        raise _refusal(place, node, "a constant is not a literal", "write it out") from error


def parse_source(text: str, place: str, *, limit_bytes: int = SOURCE_LIMIT_BYTES) -> ast.Module:
    """The syntax tree of a text of `limit_bytes`, nodes in proportion, 60 levels deep at most."""
    size = len(text.encode(errors="replace"))
    if size > limit_bytes:
        raise _refusal(place, None, f"{size} bytes are over {limit_bytes}", "make the code smaller")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = ast.parse(text)
    except SyntaxError as error:
        raise CodeRefusedError(
            f"{place}:{error.lineno or 1}: {error.msg}; correct the syntax"
        ) from error
    except (ValueError, RecursionError, MemoryError) as error:
        what = "the text is not readable as Python"
        raise _refusal(place, None, what, "make the code simpler") from error
    _check_size(module, place, limit_nodes=_NODE_LIMIT * max(1, limit_bytes // SOURCE_LIMIT_BYTES))
    for node in ast.walk(module):
        number = node.value if isinstance(node, ast.Constant) else None
        if isinstance(number, int) and number.bit_length() > _NUMBER_BITS:
            raise _refusal(place, node, "a literal is too large", "write a smaller number")
        note = getattr(node, "annotation", None) or getattr(node, "returns", None)
        if isinstance(note, ast.expr) and not all(
            isinstance(part, _ANNOTATIONS) for part in ast.walk(note)
        ):
            raise _refusal(place, note, "an unusual annotation", "name a type, such as jax.Array")
    return without_annotations(module)


def without_annotations(tree: _Tree) -> _Tree:
    """The tree, in which no parameter, result or assignment is annotated any more."""
    return _Unannotated().visit(tree)


class _Unannotated(ast.NodeTransformer):
    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is None:
            return node
        return ast.copy_location(ast.Assign(targets=[node.target], value=node.value), node)


def _check_size(module: ast.Module, place: str, *, limit_nodes: int) -> None:
    level: list[ast.AST] = [module]
    nodes = depth = 0
    while level:
        nodes, depth = nodes + len(level), depth + 1
        if nodes > limit_nodes or depth > _DEPTH_LIMIT:
            what = f"over {limit_nodes} nodes or {_DEPTH_LIMIT} levels of syntax"
            raise _refusal(place, level[0], what, "make the code simpler")
        level = [child for node in level for child in ast.iter_child_nodes(node)]


def _single(node: ast.stmt) -> list[ast.stmt]:
    """An assignment of several values to as many names, each by itself."""
    match node:
        case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)) if len(
            names
        ) == len(values):
            pairs = zip(names, values, strict=True)
            return [ast.copy_location(ast.Assign([name], value), node) for name, value in pairs]
    return [node]


def _top_level_name(node: ast.stmt, place: str, *, first: bool) -> str:
    match node:
        case ast.FunctionDef(name=name) if name not in CONSTANTS and is_plain(name):
            return name
        case ast.Assign(targets=[ast.Name(id=name)]) if name not in FUNCTION_NAMES:
            return name
        case ast.Expr(value=ast.Constant(value=str())) if first:
            return _DOCSTRING
    what = f"{python_word(node)} does not belong in a skill file"
    remedy = f"define {', '.join((*CONSTANTS, *FUNCTION_NAMES))}, helpers and named constants"
    remedy = INSTEAD.get(type(node).__name__, remedy)
    raise _refusal(place, node, what, remedy)


def _refusal(place: str, node: ast.AST | None, what: str, remedy: str) -> CodeRefusedError:
    """The error for a node: its line, what is wrong with it, and the remedy."""
    return CodeRefusedError(f"{place}:{getattr(node, 'lineno', 1)}: {what}; {remedy}")
