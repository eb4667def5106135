"""The trial: skill functions are traced, held against a budget and computed on kept moments.

Layers two and three of the gate. This runs in a process that may be killed (`flowrl.trial`): to
trace a function is to run it, with abstract arrays in the place of features.
"""

from __future__ import annotations

import ast
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from flowrl.envs.moments import moments, shape_of_one
from flowrl.envs.skill_module import namespace_of
from flowrl.skills.games import table_of

EQUATION_LIMIT = 2_000
ELEMENT_LIMIT = 1_000_000  # of one intermediate array
LARGEST_COUNT = 1_000
FORBIDDEN = ("callback", "ffi", "custom_call", "infeed", "outfeed", "host", "while", "io_")
_FEW = (1, 2, 3)
_RAISED = (
    *(TypeError, ValueError, LookupError, AttributeError, NameError, ArithmeticError),
    *(AssertionError, RuntimeError, ImportError, SyntaxError, StopIteration),
)
_BRANCHES = (ast.If, ast.IfExp, ast.BoolOp)  # all by which gated code can choose


class RefusedError(Exception):
    """What a function does that it may not: its line, what, and the remedy."""

    def __init__(self, line: int, what: str, remedy: str) -> None:
        super().__init__(what)
        self.line, self.what, self.remedy = line, what, remedy


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """Two functions to be tried for a game; the lines are those of their place."""

    env_name: str
    is_done: str
    reward: str
    is_done_line: int
    reward_line: int
    trusted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Function:
    call: Callable[..., Any]
    asks: tuple[str, ...]
    name: str
    line: int
    chooses: bool  # by its count


def warm_up() -> None:
    """Start JAX's threads and load what the first trial would."""
    jax.vmap(jnp.sum)(jnp.ones((2, 3))).block_until_ready()


def try_code(code: Code, entering: Callable[[str, int], None]) -> int | None:
    """Try both functions; the largest count they were tried with, None when any will do.

    `entering` hears the name and the line of each function before it is run.

    Raises:
      RefusedError: one of them cannot be computed, is over the budget or returns something else.
    """
    done = _read(code, "task_is_done", code.is_done, code.is_done_line)
    reward = _read(code, "task_reward", code.reward, code.reward_line)
    most = max(table_of(code.env_name).capacity, 64)
    for function in (done, reward):
        entering(function.name, function.line)
        for count in _counts(function, most):
            _try(function, count, code.env_name)
    return most if done.chooses or reward.chooses else None


def _counts(function: _Function, most: int) -> tuple[int, ...]:
    if "n" not in function.asks:
        return (1,)
    return tuple(range(1, most + 1)) if function.chooses else (*_FEW, most, LARGEST_COUNT)


def _read(code: Code, name: str, source: str, line: int) -> _Function:
    """The function, compiled so that its lines are those of its place."""
    try:
        tree = ast.parse("\n" * (line - 1) + source)
        compiled = compile(tree, name, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise RefusedError(line, f"{name} is not Python: {error}", "correct it") from error
    [definition] = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    asks = tuple(argument.arg for argument in definition.args.args)
    names = namespace_of(table_of(code.env_name).package, trusted=code.trusted)
    exec(compiled, names)  # noqa: S102 - limits hold here
    chooses = code.trusted or any(isinstance(node, _BRANCHES) for node in ast.walk(definition))
    return _Function(
        call=names[definition.name],
        asks=asks,
        name=name,
        line=line,
        chooses=chooses and "n" in asks,
    )


def _try(function: _Function, count: int, env_name: str) -> None:
    known = moments(env_name)
    features = {name: known[name] for name in function.asks if name != "n"}
    traced = _traced(function, count, shape_of_one(features))
    _check_budget(function, traced.jaxpr, traced.consts)
    if count in (*_FEW, LARGEST_COUNT):
        _check_values(function, traced, features, count)
    if count == 1 and str(_traced(function, count, shape_of_one(features))) != str(traced):
        raise _refused(function, "is another computation each time", "compute from features alone")


def _traced(function: _Function, count: int, shapes: Mapping[str, Any]) -> core.ClosedJaxpr:
    def call(features: Mapping[str, Any]) -> jax.Array:
        given = {**features, **({"n": count} if "n" in function.asks else {})}
        return jnp.asarray(function.call(**given))

    try:
        traced = jax.make_jaxpr(call)(dict(shapes))
    except _RAISED as error:
        raise _raised(function, error) from error
    [value] = traced.out_avals
    _check_kind(function, value)
    return traced


def _check_kind(function: _Function, value: Any) -> None:
    if value.shape:
        raise _refused(function, f"returns shape {value.shape}", "return one number")
    kind = np.dtype(value.dtype).kind
    if function.name == "task_is_done" and kind != "b":
        what = f"returns {value.dtype}, not a truth value"
        raise _refused(function, what, "compare, as in inventory.wood >= n")
    if kind not in "bif":
        raise _refused(function, f"returns {value.dtype}", "return one float")


def _check_budget(function: _Function, jaxpr: core.Jaxpr, consts: Any) -> None:
    for const in consts:
        _check_size(function, jnp.shape(const))
    equations = 0
    for equation, times in _equations(jaxpr, 1):
        name = equation.primitive.name
        equations += times
        if any(word in name for word in FORBIDDEN) or equation.effects:
            raise _refused(function, f"uses {name}", "compute with jnp alone")
        if equations > EQUATION_LIMIT:
            what = f"takes over {EQUATION_LIMIT} operations"
            raise _refused(function, what, "use jnp over whole arrays instead of loops")
        for variable in equation.outvars:
            _check_size(function, getattr(variable.aval, "shape", ()))


def _check_size(function: _Function, shape: tuple[int, ...]) -> None:
    elements = 1
    for size in shape:
        elements *= size
    if elements > ELEMENT_LIMIT:
        what = f"makes an array of shape {shape}"
        raise _refused(function, what, f"stay within {ELEMENT_LIMIT:,} elements")


def _equations(jaxpr: Any, times: int) -> Iterator[tuple[Any, int]]:
    """Every equation with how often it runs, those inside of others too."""
    for equation in jaxpr.eqns:
        yield equation, times
        rounds = times * equation.params.get("length", 1) if "jaxpr" in equation.params else times
        for value in equation.params.values():
            for part in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(part, "jaxpr", part)
                if hasattr(inner, "eqns"):
                    yield from _equations(inner, rounds)


def _check_values(
    function: _Function, traced: core.ClosedJaxpr, features: Mapping[str, Any], count: int
) -> None:
    call = core.jaxpr_as_fun(traced)
    leaves = jax.tree.leaves(dict(features))
    values = np.asarray(jax.vmap(call)(*leaves)[0] if leaves else call()[0])
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        wrong = int((~np.isfinite(values)).sum())
        what = f"is not finite in {wrong} of {values.size} states, with n={count}"
        raise _refused(function, what, "divide by what is never 0, or choose with jnp.where before")


def _raised(function: _Function, error: Exception) -> RefusedError:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__)]
    names = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    own = [line for line, name in zip(lines, names, strict=True) if name == function.name]
    text = " ".join(str(error).partition("\n")[0].partition(" The error occurred")[0].split())[:120]
    what = f"{function.name} raises {type(error).__name__}: {text}"
    remedy = "choose by features with jnp.where" if "Tracer" in what else "correct the function"
    return RefusedError((own or [function.line])[-1] or function.line, what, remedy)


def _refused(function: _Function, what: str, remedy: str) -> RefusedError:
    return RefusedError(function.line, f"{function.name} {what}", remedy)
