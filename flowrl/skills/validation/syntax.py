"""The syntax check: skill code is refused unless every node of its syntax tree is admitted.

Nothing is executed here. What passes is a file of constants and two functions over the features of
a game, which reach neither files nor processes nor anything of Python but arithmetic. The check
says what code may reach; what it costs, and what it returns, is measured by the dry run, in a
process with limits.
"""

from __future__ import annotations

import ast
import difflib
import math
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from flowrl.errors import CodeRefusedError
from flowrl.games.base import COUNT, Game

SOURCE_LIMIT_BYTES = 20_000
NODE_LIMIT = 4_000
DEPTH_LIMIT = 60
COUNT_LIMIT = 1_000
NUMBER_LIMIT = 1_000_000
RANGE_LIMIT = 64

CONSTANTS = (
    *("name", "description", "requirements", "consumption", "gain", "ephemeral"),
    *("max_steps", "provided_by"),
)
FUNCTION_NAMES = ("task_is_done", "task_reward")

_ADMITTED = (
    *(ast.Return, ast.Assign, ast.AugAssign, ast.If, ast.For, ast.Pass),
    *(ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.IfExp, ast.Compare, ast.Call, ast.Constant),
    *(ast.Attribute, ast.Subscript, ast.Name, ast.Tuple, ast.List, ast.Slice, ast.keyword),
    *(ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow),
    *(ast.BitAnd, ast.BitOr, ast.BitXor, ast.Invert, ast.Not, ast.UAdd, ast.USub),
    *(ast.And, ast.Or, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE),
    *(ast.Load, ast.Store),
)

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
_LAX = "abs clamp exp log max min select sign sqrt square stop_gradient tanh"
_NN = "relu sigmoid silu softplus tanh"
_TYPES = "float32 int32 bool_"

FUNCTIONS = frozenset(
    {f"jnp.{word}" for word in f"{_ELEMENTWISE} {_REDUCE} {_SHAPE} {_TYPES} linalg.norm".split()}
    | {f"jax.lax.{word}" for word in _LAX.split()}
    | {f"jax.nn.{word}" for word in _NN.split()}
)
VALUES = frozenset(f"jnp.{word}" for word in f"inf nan pi e newaxis {_TYPES}".split())
METHODS = frozenset(
    {"sum", "max", "min", "mean", "any", "all", "prod", "astype", "clip", "argmax", "argmin"}
    | {"set", "add"}
)
ATTRIBUTES = frozenset({"at", "ndim", "size", "T"})  # besides the items of the game

_Problem = tuple[ast.AST, str, str]  # where, what, and the remedy


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
            raise _refusal(place, node, f"{name} appears twice", "keep one of them")
        seen.add(name)
        if isinstance(node, ast.Assign):
            literal(node.value, place)
    for missing in sorted({"name", "gain", *FUNCTION_NAMES} - seen):
        raise _refusal(place, None, f"{missing} is missing", "a skill file must define it")
    functions = [node for node in module.body if isinstance(node, ast.FunctionDef)]
    if not fitting_games(functions, games, trusted=trusted):
        # Of the game that has most of what the file names.
        problems = (_first_problem(functions, game, trusted=trusted) for game in games)
        found = max(filter(None, problems), key=lambda problem: _position(problem[0]))
        raise _refusal(place, *found)
    return module


def fitting_games(
    functions: Iterable[ast.FunctionDef], games: Iterable[Game], *, trusted: bool = False
) -> list[Game]:
    """Those of the games for which the functions pass the check."""
    functions = list(functions)
    return [game for game in games if not _first_problem(functions, game, trusted=trusted)]


def check_function(node: ast.FunctionDef, place: str, *, game: Game, trusted: bool = False) -> None:
    """Refuse a function unless all it does is arithmetic over the features of a game.

    Of a trusted function only the signature is looked at.

    Raises:
      CodeRefusedError: with the place and the remedy.
    """
    problem = _first_problem([node], game, trusted=trusted)
    if problem is not None:
        raise _refusal(place, *problem)


def literal(node: ast.expr, place: str) -> Any:
    """The value of a literal: text, numbers, and dicts, lists, tuples and sets of them.

    Raises:
      CodeRefusedError: the expression is not a literal.
    """
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError, MemoryError) as error:
        raise _refusal(place, node, "a constant is not a literal", "write it out") from error


def parse_source(text: str, place: str, *, limit_bytes: int = SOURCE_LIMIT_BYTES) -> ast.Module:
    """The syntax tree of a bounded text: `limit_bytes`, nodes in proportion, 60 levels deep.

    Raises:
      CodeRefusedError: the text is too long, too deep or not Python.
    """
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
    _check_size(module, place, limit_nodes=NODE_LIMIT * max(1, limit_bytes // SOURCE_LIMIT_BYTES))
    return module


def _check_size(module: ast.Module, place: str, *, limit_nodes: int) -> None:
    level: list[ast.AST] = [module]
    nodes = depth = 0
    while level:
        nodes, depth = nodes + len(level), depth + 1
        if nodes > limit_nodes or depth > DEPTH_LIMIT:
            what = f"over {limit_nodes} nodes or {DEPTH_LIMIT} levels of syntax"
            raise _refusal(place, level[0], what, "make the code simpler")
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
    raise _refusal(place, node, what, remedy)


def _first_problem(
    functions: Iterable[ast.FunctionDef], game: Game, *, trusted: bool
) -> _Problem | None:
    for function in functions:
        problems = _signature_problems(function, game)
        body = iter(()) if trusted else _body_problems(function, game)
        problem = next(problems, None) or next(body, None)
        if problem is not None:
            return problem
    return None


def _signature_problems(node: ast.FunctionDef, game: Game) -> Iterator[_Problem]:
    given = node.args
    special = given.vararg or given.kwarg or given.kwonlyargs or given.posonlyargs
    annotated = node.returns or any(parameter.annotation for parameter in given.args)
    if special or annotated or node.decorator_list or getattr(node, "type_params", None):
        what = f"{node.name} has decorators, annotations or special parameters"
        yield node, what, "write plain parameters only"
    names = [parameter.arg for parameter in given.args]
    features = [COUNT, *game.features]
    for name in names:
        if name not in features:
            what = f"{node.name} asks for {name!r}, which is not a feature of {game.name}"
            yield node, what, f"choose among {', '.join(features)}"
    if len(set(names)) < len(names):
        yield node, f"{node.name} asks for a feature twice", "ask for it once"
    match given.defaults:
        case []:
            pass
        case [ast.Constant(value=int(n))] if names[-1] == COUNT and type(n) is int:
            if not 0 < n <= COUNT_LIMIT:
                yield node, f"the default n={n}", f"use a number from 1 to {COUNT_LIMIT}"
        case _:
            yield node, "a parameter has a default", "only n may have one, a number"


def _body_problems(function: ast.FunctionDef, game: Game) -> Iterator[_Problem]:
    """What is not admitted in a function's body, in the order of the text."""
    documented = ast.get_docstring(function, clean=False) is not None
    body = function.body[documented:]
    parts = [part for statement in body for part in ast.walk(statement)]
    nodes = sorted((part for part in parts if hasattr(part, "lineno")), key=_position)
    checks = _Checks(function, nodes, game)
    for node in nodes:
        stranger = next(
            (part for part in (node, *ast.iter_child_nodes(node)) if not _is_admitted(part)), None
        )
        if stranger is not None:
            what = f"{type(stranger).__name__} is not admitted in skill code"
            yield node, what, "write it with assignments, if, jnp.where and arithmetic"
        elif id(node) not in checks.done:
            problem = checks.problem(node)
            if problem is not None:
                yield node, *problem
    returned = [node.value for node in nodes if isinstance(node, ast.Return)]
    if not returned or None in returned:
        yield function, "a function returns nothing", "return its value"


class _Checks:
    """What the nodes of one function may name, each node by itself."""

    def __init__(self, function: ast.FunctionDef, nodes: Sequence[ast.AST], game: Game) -> None:
        self.game = game
        self.names = {parameter.arg for parameter in function.args.args}
        self.names |= {
            node.id
            for node in nodes
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
        self.called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
        self.done: set[int] = set()  # parts of a node that was checked as a whole

    def problem(self, node: ast.AST) -> tuple[str, str] | None:
        """What is wrong with a node, and the remedy."""
        match node:
            case ast.Name():
                return self._name(node)
            case ast.Attribute(ctx=ast.Store()) | ast.Subscript(ctx=ast.Store()):
                return "only a name can be assigned to", "use x.at[i].set(value)"
            case ast.Attribute():
                return self._attribute(node)
            case ast.Call(func=func) if not isinstance(func, ast.Name | ast.Attribute):
                called = ast.unparse(func)[:40]
                return f"a call of {called!r}", f"call jnp functions or {sorted(CALLS)}"
            case ast.keyword(arg=word) if word is None or not _is_plain(word):
                return "** or an unusual name in a call", "write the arguments out"
            case ast.Constant():
                return _constant_problem(node.value)
            case ast.For():
                return self._loop(node)
        return None

    def _name(self, node: ast.Name) -> tuple[str, str] | None:
        if not _is_plain(node.id):
            return f"the name {node.id!r}", "use plain names without a leading _"
        if isinstance(node.ctx, ast.Store):
            reserved = MODULES | CALLS | self.game.enums.keys() | {"range"}
            taken = node.id in reserved
            return (f"{node.id} is given another meaning", "choose another name") if taken else None
        if id(node) in self.called:
            remedy = f"call jnp functions or {sorted(CALLS)}"
            return None if node.id in CALLS else (f"a call of {node.id!r}", remedy)
        if node.id not in self.names:
            what = f"{node.id!r} is not a parameter, a local name or an admitted function"
            return what, "ask for the feature by parameter; see docs/skills.md"
        return None

    def _attribute(self, node: ast.Attribute) -> tuple[str, str] | None:
        called = id(node) in self.called
        path = _dotted(node)
        root, *members = path.split(".")
        if root in MODULES or root in self.game.enums:
            self.done |= {id(part) for part in ast.walk(node)}
        if root in MODULES:
            if path in VALUES or (called and path in FUNCTIONS):
                return None
            what = f"{path} is not admitted" + (" as a value" if path in FUNCTIONS else "")
            return what, "docs/skills.md lists the functions that are"
        if root in self.game.enums:
            if members[1:] != ["value"]:
                return f"{path} is not an enum's number", f"write {root}.NAME.value"
            return self._missing(members[0], f"{root}.{members[0]}", self.game.enums[root])
        known = METHODS if called else ATTRIBUTES | self.game.items
        return self._missing(node.attr, f"{ast.unparse(node.value)[:40]}.{node.attr}", known)

    def _missing(self, word: str, name: str, known: Collection[str]) -> tuple[str, str] | None:
        """A word that the game does not have; the remedy is those that come closest to it."""
        if word in known:
            return None
        close = difflib.get_close_matches(word, sorted(known), n=3, cutoff=0.5)
        names = "closest are " if close else "there are "
        return f"{name} is not in {self.game.name}", names + ", ".join(close or sorted(known))

    def _loop(self, node: ast.For) -> tuple[str, str] | None:
        match node:
            case ast.For(
                iter=ast.Call(
                    func=ast.Name(id="range") as name, args=[ast.Constant(value=times)], keywords=[]
                ),
                orelse=[],
            ) if type(times) is int and 0 <= times <= RANGE_LIMIT:
                self.done.add(id(name))
                return None
        return "for runs over something else", f"use range(k), k up to {RANGE_LIMIT}"


def _constant_problem(value: Any) -> tuple[str, str] | None:
    if value is None or value is ...:
        return None
    if not isinstance(value, int | float):
        return f"a literal {type(value).__name__}", "use numbers only"
    if not math.isfinite(value) or abs(value) > NUMBER_LIMIT:
        return "a literal is too large", f"stay within ±{NUMBER_LIMIT}"
    return None


def _refusal(place: str, node: ast.AST | None, what: str, remedy: str) -> CodeRefusedError:
    """The error for a node: its line, what is wrong with it, and the remedy."""
    return CodeRefusedError(f"{place}:{getattr(node, 'lineno', 1)}: {what}; {remedy}")


def _position(node: Any) -> tuple[int, int]:
    return node.lineno, node.col_offset


def _is_admitted(node: ast.AST) -> bool:
    return isinstance(node, _ADMITTED)


def _is_plain(word: str) -> bool:
    """Whether a name is plain; the parser has already brought it to NFKC."""
    return word.isascii() and not word.startswith("_") and "__" not in word


def _dotted(node: ast.AST) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    parts.append(node.id if isinstance(node, ast.Name) else "?")
    return ".".join(reversed(parts))
