"""The allowlist of skill functions: of their syntax, and of the names in them.

A function may have helper functions inside. Each may call only those above it: nothing recurs. A
function is called and never a value, so nothing can be asked of it. Text stands only as the key of
a dict and in the brackets that ask for one; where a function runs, numbers stand in its place
(`flowrl.skills.validation.execution`).
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from flowrl.games.base import COUNT, Game
from flowrl.skills.validation import folding
from flowrl.skills.validation.folding import Number

_COUNT_LIMIT = 1_000
NUMBER_LIMIT = 1_000_000
_RANGE_LIMIT = 64
FUNCTION_NAMES = ("task_is_done", "task_reward")

_ADMITTED = (
    *(ast.Return, ast.Assign, ast.AugAssign, ast.If, ast.For, ast.Pass),
    *(ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.IfExp, ast.Compare, ast.Call, ast.Constant),
    *(ast.Attribute, ast.Subscript, ast.Name, ast.Tuple, ast.List, ast.Slice, ast.keyword),
    *(ast.Dict, ast.ListComp, ast.GeneratorExp, ast.comprehension, ast.In, ast.NotIn),
    *(ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow),
    *(ast.BitAnd, ast.BitOr, ast.BitXor, ast.Invert, ast.Not, ast.UAdd, ast.USub),
    *(ast.And, ast.Or, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE),
    *(ast.Load, ast.Store),
)

MODULES = frozenset({"jnp", "jax"})
CALLS = frozenset({"abs", "min", "max", "len", "sum", "float", "int", "bool"})
_LOCAL = {"sum", *FUNCTION_NAMES}  # names that a variable may have: kept skills have such ones
_NUMBERS = frozenset({"float", "int", "bool"})  # also values, as in .astype(float)
# Builtins that a trusted skill's functions have besides: all but those that reach further.
_TRUSTED_CALLS = """
all any dict divmod enumerate filter isinstance list map pow reversed round set slice sorted
str tuple zip ArithmeticError AssertionError IndexError KeyError TypeError ValueError
"""
TRUSTED_CALLS = frozenset(_TRUSTED_CALLS.split())

_ELEMENTWISE = """
abs absolute add ceil clip cos divide equal exp expm1 floor floor_divide greater greater_equal
hypot isclose isfinite isinf isnan less less_equal log log1p log2 logical_and logical_not
logical_or logical_xor maximum minimum mod multiply nan_to_num negative not_equal reciprocal
remainder round select sign sin sqrt square subtract tan tanh true_divide where
ones_like zeros_like full_like arctan2 cbrt fmax fmin heaviside isin log10 power rint trunc
"""
_REDUCE = """
all any argmax argmin average count_nonzero dot inner max mean median min prod std sum var
"""
_SHAPE = """
arange argsort array asarray broadcast_to concatenate cumsum diff expand_dims flip full hstack ones
outer ravel reshape roll sort squeeze stack take transpose vstack zeros
"""
_LAX = "abs clamp exp log max min select sign sqrt square stop_gradient tanh"
_NN = "elu gelu one_hot relu sigmoid silu softmax softplus tanh"
_TYPES = "float32 int32 bool_"

FUNCTIONS = frozenset(
    {f"jnp.{word}" for word in f"{_ELEMENTWISE} {_REDUCE} {_SHAPE} {_TYPES} linalg.norm".split()}
    | {f"jax.lax.{word}" for word in _LAX.split()}
    | {f"jax.nn.{word}" for word in _NN.split()}
)
_VALUES = frozenset(f"jnp.{word}" for word in f"pi e newaxis {_TYPES}".split())
METHODS = frozenset(
    {"sum", "max", "min", "mean", "any", "all", "prod", "astype", "clip", "argmax", "argmin"}
    | {"set", "add", "round", "std", "var", "ravel", "reshape", "flatten", "squeeze"}
)
_ATTRIBUTES = frozenset({"at", "ndim", "size", "T"})  # besides the items of the game

# What to write instead of syntax, or of a name, that is not admitted.
_REMEDIES = (
    ("SetComp DictComp", "write a list, or a for loop"),
    ("Lambda FunctionDef ClassDef", "write a helper function at the top of the file"),
    ("While Break Continue", f"write for i in range(k), k up to {_RANGE_LIMIT}"),
    ("Import ImportFrom __import__", "remove it: jnp, jax and the enums of the game are there"),
    ("Try Raise Assert Match", "choose with jnp.where"),
    ("NamedExpr AnnAssign Expr", "assign a value in a line of its own, or remove the line"),
    ("Starred", "write the values out"),
    ("LShift RShift", "multiply or divide by a power of two"),
    ("MatMult jnp.matmul jnp.einsum", "write jnp.dot(a, b) or (a * b).sum()"),
    ("jax.lax.cond jnp.piecewise jnp.nonzero", "write jnp.where(condition, a, b)"),
    ("jax.lax.switch jnp.choose", "write jnp.select([condition, …], [value, …], default)"),
    ("jax.lax.fori_loop jax.lax.scan jax.lax.while_loop", "write for i in range(k)"),
    ("jax.vmap jax.lax.map jnp.vectorize", "write jnp over the whole array"),
    ("jnp.inf jnp.nan", f"write a number up to {NUMBER_LIMIT}"),
    ("np numpy math", "write jnp, which is there"),
    ("any all", "write jnp.any or jnp.all of jnp.array([…])"),
    ("round pow", "write jnp.round or **"),
)
INSTEAD = {word: remedy for words, remedy in _REMEDIES for word in words.split()}

# The names of syntax that begins with no keyword.
_NAMES = {
    "AnnAssign": "an annotation",
    "Assign": "an assignment to other than one name",
    "DictComp": "a dict comprehension",
    "Expr": "a line that computes nothing",
    "Is": "is",
    "IsNot": "is not",
    "JoinedStr": "an f-string",
    "LShift": "<<",
    "MatMult": "@",
    "NamedExpr": ":=",
    "RShift": ">>",
    "Set": "a set",
    "SetComp": "a set comprehension",
    "Starred": "*",
}


def python_word(node: ast.AST) -> str:
    """Return the keyword or the name of a piece of syntax, as its author knows it.

    >>> python_word(ast.parse("class A: pass").body[0]), python_word(ast.parse("print(1)").body[0])
    ('class', 'print')
    """
    match node:
        case ast.Expr(value=ast.Call(func=ast.Name(id=name))):
            return name
    name = type(node).__name__
    if name in _NAMES or not isinstance(node, ast.stmt | ast.expr):
        return _NAMES.get(name, name)
    return ast.unparse(node).lstrip("\n(").split()[0].rstrip(":)")


Problem = tuple[ast.AST, str, str]  # where, what, and the remedy


def first_problem(
    functions: Iterable[ast.FunctionDef], game: Game, *, trusted: bool
) -> Problem | None:
    """Return the first thing that is not admitted in the functions of a skill, or None."""
    for function in functions:
        problems = _signature_problems(function, game)
        body: Iterator[Problem] = iter(())
        if not trusted:
            count = {COUNT: game.largest_count}
            body = _body_problems(function, game, frozenset(), frozenset(), constants=count)
        problem = next(problems, None) or next(body, None)
        if problem is not None:
            return problem
    return None


def _signature_problems(node: ast.FunctionDef, game: Game) -> Iterator[Problem]:
    given = node.args
    yield from _special_problem(node)
    names = [parameter.arg for parameter in given.args]
    features = [COUNT, *game.features]
    for name in names:
        if name not in features:
            what = f"{node.name} asks for {name!r}, which is not a feature of {game.name}"
            yield node, what, _instead_of(name, features)
    if len(set(names)) < len(names):
        yield node, f"{node.name} asks for a feature twice", "ask for it once"
    match given.defaults:
        case []:
            pass
        case [ast.Constant(value=int(n))] if names[-1] == COUNT and type(n) is int:
            if not 0 < n <= _COUNT_LIMIT:
                yield node, f"the default n={n}", f"use a number from 1 to {_COUNT_LIMIT}"
        case _:
            yield node, "a parameter has a default", "only n may have one, a number"


def _instead_of(name: str, features: Sequence[str]) -> str:
    """The features that come closest; without any, all of them, those with forms once."""
    if close := difflib.get_close_matches(name, features, n=3, cutoff=0.7):
        return f"closest are {', '.join(close)}"
    forms = {form: form.removesuffix("_prev").removesuffix("_diff") for form in features}
    once = dict.fromkeys(base if base in features else form for form, base in forms.items())
    also = ", of which many also end in _prev or _diff" if len(once) < len(features) else ""
    return f"choose among {', '.join(once)}{also}"


def _special_problem(node: ast.FunctionDef) -> Iterator[Problem]:
    given = node.args
    special = given.vararg or given.kwarg or given.kwonlyargs or given.posonlyargs
    if special or node.decorator_list or getattr(node, "type_params", None):
        what = f"{node.name} has decorators or special parameters"
        yield node, what, "write plain parameters only"


def _body_problems(
    function: ast.FunctionDef,
    game: Game,
    names: frozenset[str],
    helpers: frozenset[str],
    *,
    constants: Mapping[str, Number],
) -> Iterator[Problem]:
    """Yield the things not admitted in a function's body: helpers, syntax, names.

    Args:
      names: those that it may read, besides its own.
      helpers: the functions that it may call, besides its own.
      constants: the values of names that have one value, and the largest count.
    """
    documented = ast.get_docstring(function, clean=False) is not None
    inner = [part for part in function.body if isinstance(part, ast.FunctionDef)]
    body: list[ast.AST] = [part for part in function.body[documented:] if part not in inner]
    body += [default for helper in inner for default in helper.args.defaults]
    names = names.union(parameters(function), *(names_in(part, ast.Store) for part in body))
    parts = [part for statement in body for part in ast.walk(statement)]
    nodes = sorted((part for part in parts if hasattr(part, "lineno")), key=position)
    try:
        given = parameters(function) - {COUNT if function.name in FUNCTION_NAMES else ""}
        constants = folding.constants(nodes, given, constants)
    except folding.TooLargeError as error:
        yield error.node, f"a number over {folding.BITS} bits", "compute with smaller numbers"
    for helper in inner:
        yield from _helper_problems(helper, game, names | helpers)
        yield from _body_problems(helper, game, names, helpers, constants=constants)
        helpers |= {helper.name}
    yield from _strangers(nodes)
    checks = _Checks(names, helpers, nodes, game)
    for node in nodes:
        problem = None if id(node) in checks.done else checks.problem(node)
        if problem is not None:
            yield node, *problem
    returned = [node.value for node in nodes if isinstance(node, ast.Return)]
    if not returned or None in returned:
        yield function, f"{function.name} returns nothing", "return its value"


def _strangers(nodes: Iterable[ast.AST]) -> Iterator[Problem]:
    for node in nodes:
        for part in (node, *ast.iter_child_nodes(node)):
            if not isinstance(part, _ADMITTED):
                remedy = "write it with assignments, if, jnp.where, arithmetic"
                remedy = INSTEAD.get(type(part).__name__, remedy)
                yield node, f"{python_word(part)} is not admitted in skill code", remedy


def _helper_problems(
    helper: ast.FunctionDef, game: Game, taken: Collection[str]
) -> Iterator[Problem]:
    yield from _special_problem(helper)
    for name in (helper.name, *parameters(helper)):
        if not is_plain(name):
            yield helper, f"the name {name!r} is not admitted", "use plain names without __"
        if name in _reserved(game) or (name == helper.name and name in taken):
            yield helper, f"{name} is given another meaning", "choose another name"


def names_in(tree: ast.AST, kind: type[ast.expr_context]) -> set[str]:
    """The names that are read or assigned anywhere in a tree."""
    names = (node for node in ast.walk(tree) if isinstance(node, ast.Name))
    return {node.id for node in names if isinstance(node.ctx, kind)}


def parameters(function: ast.FunctionDef) -> set[str]:
    """The names of a function's parameters."""
    return {parameter.arg for parameter in function.args.args}


def _reserved(game: Game) -> frozenset[str]:
    return MODULES | CALLS | game.enums.keys() | {"range", *FUNCTION_NAMES}


class _Checks:
    """Checks of the nodes of one function, each node by itself."""

    def __init__(
        self, names: frozenset[str], helpers: frozenset[str], nodes: Sequence[ast.AST], game: Game
    ) -> None:
        self.names, self.helpers, self.game = names, helpers, game
        self.called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
        self.done: set[int] = set()  # parts of a node that was checked as a whole

    def problem(self, node: ast.AST) -> tuple[str, str] | None:
        """Return the problem of a node, and the remedy."""
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
            case ast.For(iter=over, orelse=rest):
                return None if not rest and self._is_bounded(over) else _UNBOUNDED
            case ast.ListComp(generators=loops) | ast.GeneratorExp(generators=loops):
                bounded = [not loop.is_async and self._is_bounded(loop.iter) for loop in loops]
                return None if all(bounded) else _UNBOUNDED
        return self._value(node)

    def _value(self, node: ast.AST) -> tuple[str, str] | None:
        match node:
            case ast.keyword(arg=word) if word is None or not is_plain(word) or word[0] == "_":
                return "** or an unusual name in a call", "write the arguments out"
            case ast.Dict(keys=keys):
                self.done |= {id(key) for key in keys if _is_text(key)}
                return ("** in a dict", "write its items out") if None in keys else None
            case ast.Subscript(value=ast.Name(id=word)) if word in self.game.features and _is_text(
                node.slice
            ):
                return f"{word} has no items by name", f"write {word}.wood"
            case ast.Subscript(slice=key) if _is_text(key):
                self.done.add(id(key))  # only a dict has such an item
            case ast.Constant(value=value) if value is not None and value is not ...:
                if not isinstance(value, int | float):
                    return f"a literal {type(value).__name__}", "use numbers only"
                if abs(value) > NUMBER_LIMIT:
                    return "a literal is too large", f"stay within ±{NUMBER_LIMIT}"
        return None

    def _name(self, node: ast.Name) -> tuple[str, str] | None:
        if not is_plain(node.id):
            remedy = INSTEAD.get(node.id, "use plain names without __")
            return f"the name {node.id!r} is not admitted", remedy
        if isinstance(node.ctx, ast.Store):
            reserved = _reserved(self.game) - _LOCAL
            taken = node.id in self.helpers or node.id in reserved
            return (f"{node.id} is given another meaning", "choose another name") if taken else None
        if id(node) in self.called:
            if node.id in (CALLS - self.names) | self.helpers:
                return None
            above = f"call jnp functions, {', '.join(sorted(CALLS))}, or a helper that is above"
            return f"a call of {node.id!r}", INSTEAD.get(node.id, above)
        if node.id not in self.names | _NUMBERS:
            what = f"{node.id!r} is not a parameter, a local name or an admitted function"
            remedy = "ask for the feature by parameter; see docs/skills.md"
            return what, INSTEAD.get(node.id, remedy)
        return None

    def _attribute(self, node: ast.Attribute) -> tuple[str, str] | None:
        called = id(node) in self.called
        path = _dotted(node)
        root, *members = path.split(".")
        if root in MODULES or root in self.game.enums:
            self.done |= {id(part) for part in ast.walk(node)}
        if root in MODULES:
            if path in _VALUES or (called and path in FUNCTIONS):
                return None
            what = f"{path} is not admitted" + (" as a value" if path in FUNCTIONS else "")
            close = difflib.get_close_matches(path, sorted(FUNCTIONS), n=3, cutoff=0.8)
            names = f"closest are {', '.join(close)}" if close else "see docs/skills.md"
            return what, INSTEAD.get(path, names)
        if root in self.game.enums:
            if members[1:] != ["value"]:
                return f"{path} is not an enum's number", f"write {root}.NAME.value"
            return self._missing(members[0], f"{root}.{members[0]}", self.game.enums[root])
        known = METHODS if called else _ATTRIBUTES | self.game.items
        name = f"{ast.unparse(node.value)[:40]}.{node.attr}"
        return self._stranger(node) or self._missing(node.attr, name, known)

    def _stranger(self, node: ast.AST) -> tuple[str, str] | None:
        """The problem of the name that a chain of attributes and calls begins with, if any."""
        while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
            node = node.func if isinstance(node, ast.Call) else node.value
        known = MODULES | self.game.enums.keys()
        return self._name(node) if isinstance(node, ast.Name) and node.id not in known else None

    def _missing(self, word: str, name: str, known: Collection[str]) -> tuple[str, str] | None:
        """A word that the game does not have; the remedy is those that come closest to it."""
        if word in known:
            return None
        close = difflib.get_close_matches(word, sorted(known), n=3, cutoff=0.5)
        what, words = f"{name} is not in {self.game.name}", ", ".join(close or sorted(known))
        return what, f"closest are {words}, so spelt in the game" if close else f"there are {words}"

    def _is_bounded(self, over: ast.expr) -> bool:
        """Return whether a loop runs over a short range, or over values that are written out."""
        match over:
            case ast.Call(func=ast.Name(id="range") as name, args=[_, *_] as ends, keywords=[]):
                self.done.add(id(name))
                return _is_short(ends)
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                return len(parts) <= _RANGE_LIMIT
        return False


_UNBOUNDED = (
    "a loop over something else",
    f"use range(k), k up to {_RANGE_LIMIT}, or values written out in brackets",
)


def _is_short(ends: Sequence[ast.expr]) -> bool:
    """Return whether a range between these literals is within the limit."""
    numbers = [end.value for end in ends if isinstance(end, ast.Constant)]
    whole = [number for number in numbers if type(number) is int]
    if len(whole) < len(ends) or len(ends) > 3 or 0 in whole[2:]:
        return False
    return max(map(abs, whole)) <= NUMBER_LIMIT and len(range(*whole)) <= _RANGE_LIMIT


def _is_text(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def position(node: Any) -> tuple[int, int]:
    """Line and column, for the order of the text."""
    return node.lineno, node.col_offset


def is_plain(word: str) -> bool:
    """Return whether a name is plain; the parser has already brought it to NFKC."""
    return word.isascii() and "__" not in word


def _dotted(node: ast.AST) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    parts.append(node.id if isinstance(node, ast.Name) else "?")
    return ".".join(reversed(parts))
