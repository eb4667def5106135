"""The syntax check: skill code is refused unless every node of its syntax tree is admitted.

Nothing is executed here. What passes is a file of constants and two functions over the features of
a game, which reach neither files nor processes nor anything of Python but arithmetic.

Bounded are the text, its nodes and depth, each literal and exponent, the rounds of loops, whole
numbers however they are computed (`cost`), and the arrays whose shape is written out. How large
arrays grow by computing, what the functions return and whether they can be computed at all is found
out by the dry run, in a process with limits.
"""

from __future__ import annotations

import ast
import difflib
import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, TypeGuard

from flowrl.errors import CodeRefusedError
from flowrl.games.base import COUNT, Game
from flowrl.skills.validation.allowed import (
    ATTRIBUTES,
    CALLS,
    FUNCTIONS,
    MAKERS,
    METHODS,
    MODULES,
    VALUES,
    check_names,
    enum_names,
    feature_names,
    item_names,
    refusal,
)
from flowrl.skills.validation.cost import check_growth

SOURCE_LIMIT_BYTES = 20_000
NODE_LIMIT = 4_000
DEPTH_LIMIT = 60
COUNT_LIMIT = 1_000
NUMBER_LIMIT = 1_000_000
EXPONENT_LIMIT = 8
RANGE_LIMIT = 64
ITERATION_LIMIT = 1_024  # of nested loops together
SIZE_LIMIT = 4_096  # elements of an array whose shape is written in the code

_STATEMENTS = (ast.Return, ast.Assign, ast.AugAssign, ast.If, ast.For, ast.Pass)
_EXPRESSIONS = (
    *(ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.IfExp, ast.Compare, ast.Call, ast.Constant),
    *(ast.Attribute, ast.Subscript, ast.Name, ast.Tuple, ast.List, ast.Slice),
)
_OPERATORS = (
    *(ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow),
    *(ast.BitAnd, ast.BitOr, ast.BitXor, ast.Invert, ast.Not, ast.UAdd, ast.USub),
    *(ast.And, ast.Or, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE),
    *(ast.Load, ast.Store),
)
_ADMITTED = (*_STATEMENTS, *_EXPRESSIONS, *_OPERATORS)
_SEQUENCES = (ast.Tuple, ast.List)

CONSTANTS = (
    *("name", "description", "requirements", "consumption", "gain", "ephemeral"),
    "max_steps",
)
FUNCTION_NAMES = ("task_is_done", "task_reward")


def check_skill_source(
    text: str, place: str, *, games: Sequence[Game], trusted: bool = False
) -> ast.Module:
    """The syntax tree of a skill file that is admitted.

    One of the games must have all that it names. The bodies of a trusted file's functions are not
    looked at.

    Raises:
      CodeRefusedError: the text is not a skill file, or contains something that is not admitted.
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
    check_names(functions, place, games=games)
    return module


def check_function(node: ast.FunctionDef, place: str, *, trusted: bool = False) -> None:
    """Refuse a function unless all it does is arithmetic over the features of games.

    `check_names` checks that one game has them all. Of a trusted function only the signature is
    looked at.

    Raises:
      CodeRefusedError: with the place and the remedy.
    """
    parameters = _check_signature(node, place, feature_names())
    if trusted:
        return
    documented = ast.get_docstring(node, clean=False) is not None
    body = node.body[1:] if documented else node.body
    _check_body(body, _Scope(place, parameters))
    check_growth(body, parameters=parameters, place=place)


def literal(node: ast.expr, place: str) -> Any:
    """The value of a literal: text, numbers, and dicts, lists, tuples and sets of them.

    Raises:
      CodeRefusedError: the expression is not a literal.
    """
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError, MemoryError) as error:
        raise refusal(place, node, "a constant is not a literal", "write it out") from error


def parse_source(text: str, place: str, *, limit_bytes: int = SOURCE_LIMIT_BYTES) -> ast.Module:
    """The syntax tree of a bounded text: `limit_bytes`, nodes in proportion, 60 levels deep.

    Raises:
      CodeRefusedError: the text is too long, too deep or not Python.
    """
    size = len(text.encode(errors="replace"))
    if size > limit_bytes:
        raise refusal(place, None, f"{size} bytes are over {limit_bytes}", "make the code smaller")
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


def _check_signature(node: ast.FunctionDef, place: str, features: Sequence[str]) -> frozenset[str]:
    given = node.args
    special = given.vararg or given.kwarg or given.kwonlyargs or given.posonlyargs
    annotated = node.returns or any(parameter.annotation for parameter in given.args)
    if special or annotated or node.decorator_list or getattr(node, "type_params", None):
        what = f"{node.name} has decorators, annotations or special parameters"
        raise refusal(place, node, what, "write plain parameters only")
    names = [parameter.arg for parameter in given.args]
    for name in names:
        if name not in features:
            what = f"{node.name} asks for {name!r}, which is not a feature"
            raise refusal(place, node, what, f"choose among {', '.join(features)}")
    if len(set(names)) < len(names):
        raise refusal(place, node, f"{node.name} asks for a feature twice", "ask for it once")
    _check_defaults(node, names, place)
    return frozenset(names)


def _check_defaults(node: ast.FunctionDef, names: list[str], place: str) -> None:
    match node.args.defaults:
        case []:
            return
        case [ast.Constant(value=count)] if type(count) is int and 0 < count <= COUNT_LIMIT:
            if names[-1] == COUNT:
                return
    raise refusal(place, node, "a parameter has a default", "only n may have one, a number")


def _check_body(body: list[ast.stmt], scope: _Scope) -> None:
    """Refuse any statement or expression that is not admitted."""
    nodes = [part for statement in body for part in ast.walk(statement)]
    stored = {
        part.id for part in nodes if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
    }
    for name in sorted(stored & (MODULES | scope.enums | CALLS | {"range"})):
        what = f"{name} is given another meaning"
        raise refusal(scope.place, body[0], what, "choose another name")
    scope.names |= stored
    for statement in body:
        scope.statement(statement, iterations=1)
    returns = [part for part in nodes if isinstance(part, ast.Return)]
    if not returns or any(part.value is None for part in returns):
        line = body[0] if body else None
        raise refusal(scope.place, line, "a function returns nothing", "return its value")


class _Scope:
    """The names one function may use, and the checks of what it does with them."""

    def __init__(self, place: str, names: frozenset[str]) -> None:
        self.place = place
        self.names = names
        self.enums = enum_names()
        self.attributes = ATTRIBUTES | item_names()

    def statement(self, node: ast.stmt, *, iterations: int) -> None:
        self._admit(node)
        self._refuse_kept_sequence(node)
        if isinstance(node, ast.For):
            iterations *= self._loop(node)
            if iterations > ITERATION_LIMIT:
                raise self._no(node, f"loops run over {ITERATION_LIMIT} times", "use jnp instead")
        for field, child in _parts(node):
            if isinstance(child, ast.stmt):
                self.statement(child, iterations=iterations)
            elif field in {"target", "targets"}:
                self._target(child)
            elif field != "iter":
                self._value(child)

    def _refuse_kept_sequence(self, node: ast.stmt) -> None:
        """A list or a tuple under a name could be added to itself, again and again."""
        match node:
            case ast.Assign(targets=targets, value=ast.Tuple() | ast.List()):
                kept = not all(isinstance(target, ast.Tuple) for target in targets)
            case ast.AugAssign(value=ast.Tuple() | ast.List()):
                kept = True
            case _:
                kept = False
        if kept:
            raise self._no(node, "a sequence is given a name", "use jnp.array([...])")

    def _value(self, node: ast.AST) -> None:
        # A sequence is admitted where its length cannot be multiplied.
        for child in node.elts if isinstance(node, _SEQUENCES) else [node]:
            self.expression(child)

    def expression(self, node: ast.AST) -> None:
        self._admit(node)
        match node:
            case ast.Name():
                self._name(node)
            case ast.Constant():
                self._constant(node)
            case ast.Attribute():
                self._attribute(node, called=False)
            case ast.Call():
                self._call(node)
            case ast.Subscript():
                self.expression(node.value)
                self._sequence(node.slice)
            case ast.Tuple() | ast.List():
                raise self._no(node, "a bare sequence", "use jnp.array([...])")
            case _:
                self._operation(node)

    def _operation(self, node: ast.AST) -> None:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
            self._power(node)
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, _ADMITTED):
                raise self._not_admitted(child, node)
            self.expression(child)

    def _sequence(self, node: ast.AST) -> None:
        if not isinstance(node, _SEQUENCES):
            self.expression(node)
            return
        for child in node.elts:
            self._sequence(child)

    def _admit(self, node: ast.AST) -> None:
        if not isinstance(node, _ADMITTED):
            raise self._not_admitted(node, node)

    def _not_admitted(self, node: ast.AST, place: ast.AST) -> CodeRefusedError:
        what = f"{type(node).__name__} is not admitted in skill code"
        return self._no(place, what, "write it with assignments, if, jnp.where and arithmetic")

    def _loop(self, node: ast.For) -> int:
        match node:
            case ast.For(
                iter=ast.Call(
                    func=ast.Name(id="range"),
                    args=[ast.Constant(value=int() as times)],
                    keywords=[],
                ),
                orelse=[],
            ) if type(times) is int and 0 <= times <= RANGE_LIMIT:
                return times
        raise self._no(node, "for runs over something else", f"use range(k), k up to {RANGE_LIMIT}")

    def _target(self, node: ast.AST) -> None:
        if isinstance(node, ast.Tuple):
            for child in node.elts:
                self._target(child)
        elif isinstance(node, ast.Name):
            _check_word(node.id, node, self.place)
        else:
            raise self._no(node, "only a name can be assigned to", "use x.at[i].set(value)")

    def _name(self, node: ast.Name) -> None:
        _check_word(node.id, node, self.place)
        if node.id not in self.names:
            what = f"{node.id!r} is not a parameter, a local name or an admitted function"
            raise self._no(node, what, "ask for the feature by parameter; see docs/skills.md")

    def _constant(self, node: ast.Constant) -> None:
        value = node.value
        if value is None or value is ... or isinstance(value, bool):
            return
        if not isinstance(value, int | float):
            raise self._no(node, f"a literal {type(value).__name__}", "use numbers only")
        if not math.isfinite(value) or abs(value) > NUMBER_LIMIT:
            raise self._no(node, "a literal is too large", f"stay within ±{NUMBER_LIMIT}")

    def _power(self, node: ast.BinOp) -> None:
        exponent = node.right
        if isinstance(exponent, ast.UnaryOp) and isinstance(exponent.op, ast.USub):
            exponent = exponent.operand
        value = exponent.value if isinstance(exponent, ast.Constant) else None
        if isinstance(value, bool) or not isinstance(value, int | float) or value > EXPONENT_LIMIT:
            what = "an exponent is not a small literal"
            raise self._no(node, what, f"use a number up to {EXPONENT_LIMIT}")

    def _attribute(self, node: ast.Attribute, *, called: bool) -> None:
        _check_word(node.attr, node, self.place)
        path = _dotted(node)
        root = path.split(".", 1)[0]
        if root in MODULES:
            if path not in VALUES and not (called and path in FUNCTIONS):
                what = f"{path} is not admitted" + (" as a value" if path in FUNCTIONS else "")
                raise self._no(node, what, "docs/skills.md lists the functions that are")
        elif root in self.enums:
            self._member(node, path)
        elif node.attr in (METHODS if called else self.attributes):
            self.expression(node.value)
        else:
            raise self._no(node, f"attribute {node.attr!r}", _instead(node.attr, self.attributes))

    def _member(self, node: ast.Attribute, path: str) -> None:
        parts = path.split(".")
        if len(parts) != 3 or parts[2] != "value" or not parts[1].isupper():
            raise self._no(node, f"{path} is not an enum's number", f"write {parts[0]}.NAME.value")

    def _call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Attribute):
            self._attribute(node.func, called=True)
            if _dotted(node.func) in MAKERS:
                self._maker(node)
        elif not (isinstance(node.func, ast.Name) and node.func.id in CALLS):
            called = ast.unparse(node.func)[:40]
            raise self._no(node, f"a call of {called!r}", f"call jnp functions or {sorted(CALLS)}")
        else:
            self._builtin(node)
        for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
            self._sequence(argument)
        for keyword in node.keywords:
            if keyword.arg is None:
                raise self._no(node, "** in a call", "write the arguments out")
            _check_word(keyword.arg, node, self.place)

    def _builtin(self, node: ast.Call) -> None:
        """The least of two lists is a list: a sequence may only be the one argument, and flat."""
        inner = node.args[0].elts if _is_one_sequence(node.args) else node.args
        if any(isinstance(part, _SEQUENCES) for part in inner):
            raise self._no(node, "a sequence among other arguments", "use jnp.array([...])")

    def _maker(self, node: ast.Call) -> None:
        shape = node.args[0] if node.args else None
        sizes = shape.elts if isinstance(shape, _SEQUENCES) else [shape]
        numbers = [part.value for part in sizes if isinstance(part, ast.Constant)]
        whole = [number for number in numbers if type(number) is int]
        keywords = {keyword.arg for keyword in node.keywords} - {"dtype", "fill_value"}
        several = isinstance(node.func, ast.Attribute) and node.func.attr == "arange"
        several = several and len(node.args) > 1
        if len(whole) != len(sizes) or math.prod(whole) > SIZE_LIMIT or keywords or several:
            what = f"{ast.unparse(node.func)} of a size that is not one small literal"
            raise self._no(node, what, f"write the shape in numbers, {SIZE_LIMIT} elements at most")

    def _no(self, node: ast.AST, what: str, remedy: str) -> CodeRefusedError:
        return refusal(self.place, node, what, remedy)


def _check_word(word: str, node: ast.AST, place: str) -> None:
    """Refuse a name that is not plain: the parser has already brought it to NFKC."""
    if not word.isascii() or word.startswith("_") or "__" in word:
        raise refusal(place, node, f"the name {word!r}", "use plain names without a leading _")


def _is_one_sequence(args: list[ast.expr]) -> TypeGuard[list[ast.Tuple | ast.List]]:
    return len(args) == 1 and isinstance(args[0], _SEQUENCES)


def _parts(node: ast.stmt) -> Iterator[tuple[str, ast.AST]]:
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield field, child


def _instead(attribute: str, attributes: frozenset[str]) -> str:
    close = difflib.get_close_matches(attribute, sorted(attributes | METHODS), n=3)
    return f"closest are {', '.join(close)}" if close else "use an item or a jnp function"


def _dotted(node: ast.AST) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    parts.append(node.id if isinstance(node, ast.Name) else "?")
    return ".".join(reversed(parts))
