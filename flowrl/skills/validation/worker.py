"""The dry run's process: `python -m flowrl.skills.validation.worker`, started by `dry_run`.

Skill functions are traced, held against a budget and computed on the kept moments of the game. To
trace a function is to run it, with abstract arrays in place of features, so this process may be
killed. It reads one JSON object from standard input and writes one JSON line per event to standard
output. Once it has loaded what it needs it gives up the rest: it can write no file, its memory is
limited, and an alarm ends it when a function takes too long.
"""

from __future__ import annotations

import ast
import ctypes
import json
import math
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import TracebackType
from typing import Any, NamedTuple, TextIO

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from flowrl.errors import RAISED, format_raised
from flowrl.games.base import COUNT, Game, find_game
from flowrl.games.random_play import moments_of
from flowrl.skills.skill import CodeOrigin
from flowrl.skills.validation.cache import parsed_function
from flowrl.skills.validation.dry_run import EXIT_MEMORY, Limits, SkillCode
from flowrl.skills.validation.execution import execute_functions
from flowrl.skills.validation.indices import doubtful_indices
from flowrl.skills.validation.ranges import Range, decided

_EQUATION_LIMIT = 2_000
_ELEMENT_LIMIT = 1_000_000  # of one intermediate array
WORK_LIMIT = 40_000  # as `work` counts it; a timestep of Craftax-Classic counts 1,800,000
_COSTLY = 8  # so often counts each number of what is not plain arithmetic
_COSTLY_WORDS = (
    *("sort", "scatter", "gather", "cum"),
    *("sin", "cos", "tan", "pow", "exp", "log", "erf"),
)
_FORBIDDEN = (
    *("callback", "ffi", "custom_call", "infeed", "outfeed", "host", "while", "_io_"),
    *("svd", "eig", "geqrf", "householder", "cholesky", "schur", "solve", "_lu_", "_qr_"),
    *("hessenberg", "tridiagonal", "fft", "conv_general"),  # `work` does not know what these cost
)
_OPEN_FILES = 256
_NUMBERS = (bool, int, float, np.ndarray, np.generic, jax.Array)
_RETURN = {
    "task_is_done": "return one truth value, as in inventory.wood >= n or jnp.all(…)",
    "task_reward": "return one number",
}
_PR_SET_PDEATHSIG = 1
_ANY_COUNT = jax.ShapeDtypeStruct((), np.int32, weak_type=True)


class _RefusedError(Exception):
    """A refusal of a function, with the remedy; and its line."""

    def __init__(self, line: int, what: str, remedy: str) -> None:
        super().__init__(f"{what}; {remedy}")
        self.line = line


@dataclass(frozen=True, slots=True, kw_only=True)
class _Function:
    call: Callable[..., Any]
    asks: tuple[str, ...]
    name: str
    line: int
    source: str
    exact: bool  # whether the lines of the source follow one another in the file


def main() -> int:
    """Try all codes of the order; returns the exit code."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    reports = os.fdopen(os.dup(1), "w", buffering=1)
    order = json.load(sys.stdin)
    codes = [
        SkillCode(**{**data, "origin": CodeOrigin(**data["origin"])}) for data in order["codes"]
    ]
    sys.excepthook = partial(_report_error, reports)  # of the game's code, or of ours
    for number in range(3):  # whatever is printed goes nowhere
        os.dup2(os.open(os.devnull, os.O_RDWR), number)
    jax.vmap(jnp.sum)(jnp.ones((2, 3))).block_until_ready()  # starts JAX's threads
    for name in dict.fromkeys(code.env_name for code in codes):
        _known_states(name)  # a game's libraries may need files
    limits = Limits(**order["limits"])
    _limit_memory_and_files(limits.megabytes)
    for number, code in enumerate(codes):
        try:
            game, states = find_game(code.env_name), _known_states(code.env_name)
            for function in _read(code, game):
                _report(reports, "begins", code=number, name=function.name, line=function.line)
                signal.setitimer(signal.ITIMER_REAL, limits.seconds)
                _try(function, states, game, begins_anew=code.begins_anew)
            _report(reports, "passed", code=number)
        except _RefusedError as refused:
            _report(reports, "refused", code=number, line=refused.line, why=str(refused))
        except MemoryError:
            os._exit(EXIT_MEMORY)
        signal.setitimer(signal.ITIMER_REAL, 0)
    return 0


def _report(reports: TextIO, event: str, **fields: Any) -> None:
    reports.write(json.dumps({"event": event, **fields}) + "\n")


def _report_error(
    reports: TextIO, kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Report an error that ends the process, with the line that raised it."""
    _report(reports, "broken", code=0, why=format_raised(error))


def _limit_memory_and_files(megabytes: int) -> None:
    """From here on: so much more memory than now, no file, no core dump."""
    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123 - not a Path of ours
        now = int(file.read().split()[0]) * resource.getpagesize()
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    wanted = {
        resource.RLIMIT_AS: now + megabytes * 2**20,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: _OPEN_FILES,
    }
    for limit, value in wanted.items():
        _, most = resource.getrlimit(limit)
        bound = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(limit, (bound, bound))


def _read(code: SkillCode, game: Game) -> list[_Function]:
    """The two functions, compiled so that their lines are those of their place."""
    functions = []
    done = ("task_is_done", code.is_done, code.origin.is_done)
    for name, source, line in (done, ("task_reward", code.reward, code.origin.reward)):
        try:
            definition = ast.increment_lineno(parsed_function(source), line - 1)
            [call] = execute_functions([definition], game, place=name, trusted=code.trusted)
        except (SyntaxError, ValueError, RecursionError) as error:
            raise _RefusedError(line, f"{name} is not Python: {error}", "correct it") from error
        asks = tuple(argument.arg for argument in definition.args.args)
        functions.append(
            _Function(
                call=call, asks=asks, name=name, line=line, source=source, exact=code.origin.exact
            )
        )
    return functions


class _States(NamedTuple):
    """Every feature in M moments, then in W states where nothing was done on purpose."""

    features: Mapping[str, Any]
    """Leaves `[M + W, …]`."""
    moments: int
    """M."""


@cache
def _known_states(env_name: str) -> _States:
    """The states of a game on which code is tried; W is 0 where no such states are kept."""
    engine = find_game(env_name).make()
    moments = moments_of(find_game(env_name), engine)
    count = len(jax.tree.leaves(dict(moments))[0])
    fresh = getattr(engine, "fresh", dict)()
    if not fresh:
        return _States(moments, count)
    parts = ({name: states[name] for name in moments} for states in (moments, fresh))
    return _States(jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts), count)


def _try(function: _Function, states: _States, game: Game, *, begins_anew: bool) -> None:
    """Trace a function with every count that a plan may have; compute it with a few of them.

    Raises _RefusedError if it cannot be computed, is over the budget or returns something else; or
    if it `begins_anew` and is done in all states where nothing was done on purpose.
    """
    features = {name: states.features[name] for name in function.asks if name != COUNT}
    first = _checked(function, 1, features)
    if str(_traced(function, 1, features)) != str(first):
        raise _refused(function, "is another computation each time", "compute from features")
    most = game.largest_count if COUNT in function.asks else 1
    whole = _for_any_count(function, features) if most > 1 else None
    few = sorted({1, min(2, most), most})
    values, fixed = [], True
    for count in few if whole else range(1, most + 1):
        traced = first if count == 1 else _checked(function, count, features)
        if count in few:
            values.append(_finite_values(function, traced, features, count))
            fixed &= isinstance(traced.jaxpr.outvars[0], core.Literal)
    if function.name == "task_is_done":
        _check_ranges(function, whole or first, features, game)
        _check_success(function, values, states.moments, fixed=fixed, begins_anew=begins_anew)


def _for_any_count(function: _Function, features: Mapping[str, Any]) -> core.ClosedJaxpr | None:
    """The code of a function if it is the same for every count, which is its last argument.

    Python then decides nothing by the count, and no index may depend on it.
    """
    try:
        traced = _traced(function, _ANY_COUNT, features)
        _check_budget(function, traced.jaxpr, traced.consts)
    except _RefusedError:
        return None  # it is told with the count for which it is so
    found = doubtful_indices(traced.jaxpr, traced.consts)
    return None if any(each.index is None for each in found) else traced


def _checked(function: _Function, count: int, features: Mapping[str, Any]) -> core.ClosedJaxpr:
    """The code of a function with this count, within the budget and the shapes of features."""
    traced = _traced(function, count, features)
    _check_budget(function, traced.jaxpr, traced.consts)
    _check_indices(function, traced, features)
    return traced


def _check_success(
    function: _Function,
    values: Sequence[np.ndarray],
    moments: int,
    *,
    fixed: bool,
    begins_anew: bool,
) -> None:
    """Refuse a success that is always so, never, or before anything is done on purpose.

    Args:
      values: with some counts each, in moments, then in states where nothing was done on purpose.
    """
    if fixed or all(each[:moments].all() for each in map(np.atleast_1d, values)):
        what = "is true in every known state" if values[-1].all() else "is never true"
        raise _refused(function, what, "say by features when the skill is done")
    fresh = [each[moments:] for each in map(np.atleast_1d, values)]
    if begins_anew and all(each.size and each.all() for each in fresh):
        what = f"is true in all {len(fresh[0])} states in which nothing was done on purpose"
        raise _refused(function, what, "say by features what the skill changes")


def _check_ranges(
    function: _Function, traced: core.ClosedJaxpr, features: Mapping[str, Any], game: Game
) -> None:
    """Refuse a comparison that is the same for all values that a feature can have."""
    names = _leaf_names(features)
    ranges: list[Range | None] = []
    for number, name in enumerate(names):
        bounds = game.bounds_of(name)
        ranges.append(None if bounds is None else Range(*bounds, argument=number))
    if len(ranges) < len(traced.jaxpr.invars):
        ranges.append(Range(1, game.largest_count, varies=False))
    for found in decided(traced.jaxpr, traced.consts, ranges):
        value, constant = sorted(found[:2], key=lambda side: not side.varies)
        name = "a value" if value.argument is None else names[value.argument]
        what = f"{function.name} compares {name} with {_shown(constant)}"
        what += f", and it is {_shown(value)} in {game.name}"
        raise _RefusedError(_line(function, found.traceback), what, "correct the number")


def _shown(found: Range) -> str:
    if found.least == found.most:
        return f"{found.least:g}"
    return f"{found.least:g} to {found.most:g}"


def _leaf_names(features: Mapping[str, Any]) -> list[str]:
    """The names of the arguments of traced code, such as `inventory.wood`."""
    paths = jax.tree_util.tree_leaves_with_path(dict(features))
    return [path[0].key + jax.tree_util.keystr(tuple(path[1:])) for path, _ in paths]


def _line(function: _Function, traceback: Any) -> int:
    """The line of a function's file at which an operation was traced."""
    frames = traceback.frames if traceback else ()
    lines = [frame.line_num for frame in frames if frame.file_name == function.name]
    return lines[0] if lines and function.exact else function.line


def _traced(
    function: _Function, count: int | jax.ShapeDtypeStruct, features: Mapping[str, Any]
) -> core.ClosedJaxpr:
    """The code of a function with this count, or with any, which is then its last argument."""
    any_count = (count,) if isinstance(count, jax.ShapeDtypeStruct) else ()

    def call(features: Mapping[str, Any], *counts: Any) -> jax.Array:
        [given_count] = counts or (count,)
        given = {**features, **({COUNT: given_count} if COUNT in function.asks else {})}
        value = function.call(**given)
        if not all(isinstance(part, _NUMBERS) for part in _parts(value)):
            what = "None" if value is None else f"a value of type {type(value).__name__}"
            raise _refused(function, f"returns {what}", _RETURN[function.name])
        if type(value) not in (list, tuple) and (shape := jnp.shape(value)):
            raise _refused(function, f"returns shape {shape}", _RETURN[function.name])
        return jnp.asarray(value)

    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), dict(features)
    )
    try:
        traced = jax.make_jaxpr(call)(shapes, *any_count)
    except RAISED as error:
        raise _raised(function, error) from error
    [value] = traced.out_avals
    _check_kind(function, value)
    return traced


def _parts(value: Any) -> list[Any]:
    """The value, or the items of a plain list or tuple, however deep."""
    if type(value) in (list, tuple):
        return [part for item in value for part in _parts(item)]
    return [value]


def _check_kind(function: _Function, value: Any) -> None:
    if value.shape not in ((), *[(2,)] * (function.name == "task_reward")):
        raise _refused(function, f"returns shape {value.shape}", _RETURN[function.name])
    kind = np.dtype(value.dtype).kind
    if function.name == "task_is_done" and kind != "b":
        what = f"returns {value.dtype}, not a truth value"
        raise _refused(function, what, "compare, as in inventory.wood >= n")
    if kind not in "bif":
        raise _refused(function, f"returns {value.dtype}", "return one float")


def _check_budget(function: _Function, jaxpr: core.Jaxpr, consts: Any) -> None:
    for const in consts:
        _check_size(function, jnp.shape(const))
    operations = numbers = 0
    for equation, times in equations(jaxpr):
        name = equation.primitive.name
        operations += times
        numbers += times * work(equation)
        if any(word in f"_{name}_" for word in _FORBIDDEN) or equation.effects:
            raise _refused(function, f"uses {name}", "compute with jnp alone")
        if operations > _EQUATION_LIMIT:
            what = f"takes over {_EQUATION_LIMIT} operations"
            raise _refused(function, what, "use jnp over whole arrays instead of loops")
        for variable in equation.outvars:
            _check_size(function, getattr(variable.aval, "shape", ()))
    if numbers > WORK_LIMIT:
        what = f"computes {numbers:,} numbers in a timestep, over {WORK_LIMIT:,}"
        raise _refused(function, what, "use smaller arrays")


def _check_size(function: _Function, shape: tuple[int, ...]) -> None:
    if math.prod(shape) > _ELEMENT_LIMIT:
        what = f"makes an array of shape {shape}"
        raise _refused(function, what, f"stay within {_ELEMENT_LIMIT:,} elements")


def _check_indices(
    function: _Function, traced: core.ClosedJaxpr, features: Mapping[str, Any]
) -> None:
    """Refuse an index that is beyond a feature's shape; JAX would clamp it."""
    for wrong in doubtful_indices(traced.jaxpr, traced.consts):
        if wrong.index is None:
            continue
        names = _leaf_names(features)
        name = "a value" if wrong.argument is None else names[wrong.argument]
        what = f"{function.name} asks for number {wrong.index} of {name}"
        what += f", which has {wrong.length} there (0 to {wrong.length - 1})"
        raise _RefusedError(_line(function, wrong.traceback), what, "correct the index")


def work(equation: core.JaxprEqn) -> int:
    """Return the count of numbers that an operation computes, costly ones several times."""
    name = equation.primitive.name
    parts = (*equation.invars, *equation.outvars)
    sizes = [math.prod(getattr(part.aval, "shape", ())) for part in parts]
    if name == "dot_general":  # of [m, k] and [k, n]: m × k × n
        return math.isqrt(math.prod(sizes))
    costly = _COSTLY if any(word in name for word in _COSTLY_WORDS) else 1
    rounds = max(sizes).bit_length() if "sort" in name else 1
    return max(sizes, default=0) * costly * rounds


def equations(jaxpr: Any, times: int = 1) -> Iterator[tuple[Any, int]]:
    """Every equation with how often it runs, those inside of others too."""
    for equation in jaxpr.eqns:
        yield equation, times
        rounds = times * equation.params.get("length", 1) if "jaxpr" in equation.params else times
        for value in equation.params.values():
            for part in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(part, "jaxpr", part)
                if hasattr(inner, "eqns"):
                    yield from equations(inner, rounds)


def _finite_values(
    function: _Function, traced: core.ClosedJaxpr, features: Mapping[str, Any], count: int
) -> np.ndarray:
    """The values in all moments, `[M]`."""
    call = core.jaxpr_as_fun(traced)
    leaves = jax.tree.leaves(dict(features))
    values = np.asarray(jax.vmap(call)(*leaves)[0] if leaves else call()[0])
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        wrong = int((~np.isfinite(values)).sum())
        what = f"is not finite in {wrong} of {values.size} states, with n={count}"
        raise _refused(function, what, "divide by what is never 0, or choose with jnp.where before")
    return values


def _raised(function: _Function, error: Exception) -> _RefusedError:
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno or 1 for frame in frames if frame.filename == function.name]
    last = [function.line, *lines][-1]
    quoted = function.source.splitlines()[last - function.line].strip()
    text = " ".join(str(error).partition("\n")[0].partition(" The error occurred")[0].split())[:120]
    what = f"{function.name} raises {type(error).__name__}: {text} in `{quoted[:80]}`"
    tracer = "tracer" in what.lower()
    remedy = _instead(function, last - function.line + 1) if tracer else "correct the function"
    return _RefusedError(last if function.exact else function.line, what, remedy)


def _instead(function: _Function, line: int) -> str:
    """Return the remedy for a line of the source that asks Python for the value of a feature."""
    for node in ast.walk(parsed_function(function.source)):
        if isinstance(node, ast.expr) and node.lineno <= line <= (node.end_lineno or line):
            match node:
                case ast.BoolOp(op=op):
                    sign = "&" if isinstance(op, ast.And) else "|"
                    return f"write a {sign} b, with brackets around each comparison"
                case ast.UnaryOp(op=ast.Not()):
                    return "write ~a"
                case ast.Compare(ops=[_, _, *_]):
                    return "write (a < b) & (b < c)"
                case ast.Call(func=ast.Name(id="min" | "max" as word)):
                    return f"write jnp.{word}imum(a, b)"
                case ast.Call(func=ast.Name(id="int" | "float" | "bool" as word)):
                    return f"write a.astype({word})"
    return "choose by features with jnp.where"


def _refused(function: _Function, what: str, remedy: str) -> _RefusedError:
    return _RefusedError(function.line, f"{function.name} {what}", remedy)


if __name__ == "__main__":
    sys.exit(main())
