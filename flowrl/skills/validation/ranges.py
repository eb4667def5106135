"""Comparisons that the ranges of features decide; it stands alone as a walk with bounds.

`player_level == 9` is false on every floor there is. Each value of traced code gets the least and
the most that it can be. What an operation without a rule yields is not known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend import core

_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_CALLS = ("jit", "pjit")
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


_Rule = Callable[[Any, Sequence[Range]], Range]


def _same(equation: Any, given: Sequence[Range]) -> Range:
    """The range of the first operand: some of its elements, perhaps as another type."""
    is_truth = equation.outvars[0].aval.dtype == bool
    return Range(0, 1) if is_truth and given[0].most > 1 else given[0]


def _any_of(equation: Any, given: Sequence[Range]) -> Range:
    return _around([end for each in given for end in each[:2]], given)


def _products(equation: Any, given: Sequence[Range]) -> Range:
    return _around([one * other for one in given[0][:2] for other in given[1][:2]], given)


def _sum(equation: Any, given: Sequence[Range]) -> Range:
    sizes = [math.prod(each.aval.shape) for each in (equation.invars[0], equation.outvars[0])]
    often = sizes[0] // max(sizes[1], 1)
    return _around([end * often for end in given[0][:2]], given)


def _ends(compute: Callable[..., float]) -> _Rule:
    """The rule of an operation that grows with each operand."""

    def rule(equation: Any, given: Sequence[Range]) -> Range:
        least, most = (compute(*(each[side] for each in given)) for side in (0, 1))
        return _around([least, most], given)

    return rule


def _truth(equation: Any, given: Sequence[Range]) -> Range:
    """The range of what is true or false; of whole numbers, `~` and `&` have no rule."""
    return Range(0, 1) if equation.outvars[0].aval.dtype == bool else _around([math.nan], given)


def _around(values: Sequence[float], given: Sequence[Range]) -> Range:
    if any(map(math.isnan, values)):
        return Range(-math.inf, math.inf)
    return Range(min(values), max(values), varies=any(each.varies for each in given))


_RULES: Mapping[str, _Rule] = {
    **dict.fromkeys(
        (
            *("slice", "squeeze", "reshape", "broadcast_in_dim", "transpose", "rev", "copy"),
            *("expand_dims", "gather", "dynamic_slice", "convert_element_type"),
            *("reduce_max", "reduce_min", "reduce_and", "reduce_or"),
        ),
        _same,
    ),
    **dict.fromkeys(("and", "or", "not"), _truth),
    "add": _ends(lambda one, other: one + other),
    "max": _ends(max),
    "min": _ends(min),
    "sub": lambda equation, given: _around(
        [given[0].least - given[1].most, given[0].most - given[1].least], given
    ),
    "neg": lambda equation, given: _around([-given[0].least, -given[0].most], given),
    "abs": lambda equation, given: _around([0, -given[0].least, given[0].most], given),
    "mul": _products,
    "reduce_sum": _sum,
    "concatenate": _any_of,
    "select_n": lambda equation, given: _any_of(equation, given[1:]),
}


def decided(
    jaxpr: core.Jaxpr, consts: Sequence[Any], given: Sequence[Range | None]
) -> Iterator[Decided]:
    """Yield the comparisons that have one outcome for all values within the ranges.

    Not those that are always true of values which may be equal, such as `wood >= 0`.

    Args:
      given: the range of each argument; None where it is not known.
    """
    found: list[Decided] = []
    _walk(jaxpr, consts, given, found)
    yield from found


def _walk(
    jaxpr: core.Jaxpr,
    consts: Sequence[Any],
    given: Sequence[Range | None],
    found: list[Decided] | None,
) -> list[Range | None]:
    """The ranges of the results; comparisons within JAX's own functions are not looked at."""
    ranges: dict[Any, Range | None] = dict(zip(jaxpr.invars, given, strict=True))
    ranges |= zip(jaxpr.constvars, map(_constant, consts), strict=True)

    def range_of(part: Any) -> Range | None:
        return _constant(part.val) if isinstance(part, core.Literal) else ranges[part]

    for equation in jaxpr.eqns:
        name, operands = equation.primitive.name, [range_of(part) for part in equation.invars]
        results: Sequence[Range | None] = [None] * len(equation.outvars)
        if name in _CALLS and (inner := equation.params["jaxpr"]):
            results = _walk(inner.jaxpr, inner.consts, operands, None)
        elif name in _COMPARISONS:
            results, (left, right) = [Range(0, 1)], operands
            if found is not None and left and right and _is_own(equation):
                sides = Decided(left, right, equation.source_info.traceback)
                found += [sides] if _is_decided(name, left, right) else []
        elif rule := _RULES.get(name):
            used = operands[:1] if rule is _same else operands
            known = [each for each in used if each is not None]
            results = [rule(equation, known) if len(known) == len(used) else None]
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
