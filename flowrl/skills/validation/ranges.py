"""Comparisons that the ranges of features decide; it stands alone as a walk with bounds.

`player_level == 9` is false on every floor there is. Each value of traced code gets the least and
the most that it can be. What an operation without a rule yields is not known.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np

_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_CALLS = ("jit", "pjit")
_CONVERT = "convert_element_type"
_INDEXING = "/jax/_src/numpy/indexing.py"  # JAX's own comparisons of an index with 0


class Range(NamedTuple):
    """The least and the most of a value; the argument, if it is one; False for a constant."""

    least: float
    most: float
    argument: int | None = None
    varies: bool = True


class Decided(NamedTuple):
    """A comparison with one outcome: its sides, and its place."""

    left: Range
    right: Range
    traceback: Any


# Operations that lie between their results for the least and the most of each operand.
_BETWEEN: Mapping[str, Callable[..., float]] = {
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "neg")},
    **{"max": max, "min": min},
}
# Operations that yield elements of the first operand, perhaps as another type.
_ELEMENTS = frozenset(
    (
        *("slice", "squeeze", "reshape", "broadcast_in_dim", "transpose", "rev", "copy"),
        *("expand_dims", "gather", "dynamic_slice", _CONVERT),
        *("reduce_max", "reduce_min", "reduce_and", "reduce_or"),
    )
)


def _range(equation: Any, given: Sequence[Range | None]) -> Range | None:
    """The range of an operation's result; None where it is not known."""
    name, result = equation.primitive.name, equation.outvars[0].aval
    if result.dtype == bool:
        return Range(0, 1)
    if name in _ELEMENTS:
        return _as_integers(given[0], result.dtype) if name == _CONVERT else given[0]
    known = [each for each in given if each is not None]
    if len(known) < len(given):
        return None
    if name in _BETWEEN:
        ends = [_BETWEEN[name](*corner) for corner in product(*(each[:2] for each in known))]
    elif name in ("concatenate", "select_n"):
        ends = [end for each in known[name == "select_n" :] for end in each[:2]]
    elif name == "reduce_sum":
        times = math.prod(equation.invars[0].aval.shape) // max(1, math.prod(result.shape))
        ends = [end * times for end in known[0][:2]]
    else:
        return None
    if any(map(math.isnan, ends)):  # such as 0 × inf
        return None
    return Range(min(ends), max(ends), varies=any(each.varies for each in known))


def _as_integers(given: Range | None, dtype: Any) -> Range | None:
    """The range of values that become integers, rounded towards 0; None if some cannot.

    Of another type it stays.
    """
    if given is None or dtype.kind not in "iu":
        return given
    limits = np.iinfo(dtype)
    if not limits.min <= given.least <= given.most <= limits.max:
        return None
    return given._replace(least=math.trunc(given.least), most=math.trunc(given.most))


def decided(jaxpr: Any, consts: Sequence[Any], given: Sequence[Range | None]) -> list[Decided]:
    """Return the comparisons that have one outcome for all values within the ranges.

    Not those that are always true of values which may be equal, such as `wood >= 0`.

    Args:
      given: the range of each argument; None where it is not known.
    """
    found: list[Decided] = []
    _walk(jaxpr, consts, given, found)
    return found


def _walk(
    jaxpr: Any,
    consts: Sequence[Any],
    given: Sequence[Range | None],
    found: list[Decided] | None,
) -> list[Range | None]:
    """The ranges of the results; comparisons within JAX's own functions are not looked at."""
    ranges: dict[Any, Range | None] = dict(zip(jaxpr.invars, given, strict=True))
    ranges |= zip(jaxpr.constvars, map(_constant, consts), strict=True)

    def range_of(part: Any) -> Range | None:
        is_literal = hasattr(part, "val")  # so this module does without JAX
        return _constant(part.val) if is_literal else ranges[part]

    for equation in jaxpr.eqns:
        name, operands = equation.primitive.name, [range_of(part) for part in equation.invars]
        results: Sequence[Range | None] = [None] * len(equation.outvars)
        if name in _CALLS:
            inner = equation.params["jaxpr"]
            results = _walk(inner.jaxpr, inner.consts, operands, None)
        elif len(results) == 1:
            results = [_range(equation, operands)]
        if found is not None and name in _COMPARISONS and _is_own(equation):
            left, right = operands
            if left and right and _is_decided(name, left, right):
                found.append(Decided(left, right, equation.source_info.traceback))
        ranges |= zip(equation.outvars, results, strict=True)
    return [range_of(part) for part in jaxpr.outvars]


def _constant(value: Any) -> Range | None:
    array = np.asarray(value)
    if array.dtype.kind not in "biuf" or not array.size:
        return None
    return Range(float(array.min()), float(array.max()), varies=False)


def _is_decided(name: str, left: Range, right: Range) -> bool:
    if left.varies == right.varies:
        return False
    never = (name == "gt" and left.most <= right.least) or (
        name == "lt" and left.least >= right.most
    )
    return never or left.most < right.least or right.most < left.least


def _is_own(equation: Any) -> bool:
    traceback = equation.source_info.traceback
    frames = traceback.frames if traceback else ()
    return not any(frame.file_name.endswith(_INDEXING) for frame in frames)
