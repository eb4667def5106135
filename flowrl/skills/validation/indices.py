"""Indices beyond an array's shape; it stands alone as a walk through traced code.

JAX clamps an index that is too large: `player_intrinsics[4]` is the last of four numbers. So every
index whose value does not depend on a feature is computed here and held against the shape. An
index that is read from a feature may be out of range where the result is not used.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend import core

_MOST_NUMBERS = 1_000  # of a value that is computed to know an index


class DoubtfulIndex(NamedTuple):
    """An index, the length of the axis that it is beyond, and the argument, if it is one.

    None is an index that depends on an argument.
    """

    index: int | None
    length: int
    argument: int | None
    traceback: Any


def doubtful_indices(
    jaxpr: core.Jaxpr, consts: Sequence[Any], given: Sequence[Any] | None = None
) -> Iterator[DoubtfulIndex]:
    """Yield the indices of traced code that are beyond the shapes, or not known.

    Args:
      given: what is known of the arguments: a number's value, or which argument of the whole code
        it is.
    """
    known: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    arguments = given or [_Argument(number) for number in range(len(jaxpr.invars))]
    known |= zip(jaxpr.invars, arguments, strict=True)

    def value(part: Any) -> Any:
        found = part.val if isinstance(part, core.Literal) else known.get(part)
        is_known = not (found is None or isinstance(found, _Argument)) and _is_small(part)
        return np.asarray(found) if is_known else found

    for equation in jaxpr.eqns:
        values = [value(part) for part in equation.invars]
        if (inner := equation.params.get("jaxpr")) and equation.primitive.name in ("jit", "pjit"):
            yield from doubtful_indices(inner.jaxpr, inner.consts, values)
        yield from _wrong(equation, values)
        if all(isinstance(each, np.ndarray) for each in values):
            known |= zip(equation.outvars, _computed(equation, values), strict=True)


class _Argument(NamedTuple):
    number: int


def _wrong(equation: Any, values: Sequence[Any]) -> Iterator[DoubtfulIndex]:
    """Yield the indices of one operation that are beyond, or not known."""
    shape = getattr(equation.invars[0].aval, "shape", ()) if equation.invars else ()
    match equation.primitive.name:
        case "dynamic_slice":
            starts, sizes = values[1:], equation.params["slice_sizes"]
            asked = list(enumerate(starts))
        case "gather":
            numbers = equation.params["dimension_numbers"]
            asked = _columns(values[1], numbers.start_index_map)
            sizes = equation.params["slice_sizes"]
        case name if name.startswith("scatter"):
            numbers = equation.params["dimension_numbers"]
            asked = _columns(values[1], numbers.scatter_dims_to_operand_dims)
            sizes = [1] * len(shape)
        case _:
            return
    argument = values[0].number if isinstance(values[0], _Argument) else None
    for axis, starts in asked:
        known = isinstance(starts, np.ndarray)
        if not known:
            yield DoubtfulIndex(None, shape[axis], argument, equation.source_info.traceback)
        for start in np.unique(starts).tolist() if known else ():
            if not 0 <= start <= shape[axis] - sizes[axis]:
                index = start if start >= 0 else start - shape[axis]
                yield DoubtfulIndex(index, shape[axis], argument, equation.source_info.traceback)


def _computed(equation: Any, values: Sequence[np.ndarray]) -> list[Any]:
    """The results of one operation."""
    variables = [part for part in equation.invars if not isinstance(part, core.Literal)]
    pairs = zip(equation.invars, values, strict=True)
    given = [value for part, value in pairs if not isinstance(part, core.Literal)]
    alone = core.Jaxpr((), variables, equation.outvars, [equation])
    return core.jaxpr_as_fun(core.ClosedJaxpr(alone, ()))(*given)


def _columns(indices: Any, axes: Sequence[int]) -> list[tuple[int, Any]]:
    """Each axis with the indices that are asked of it, None where they are not known."""
    known = isinstance(indices, np.ndarray)
    return [(axis, indices[..., column] if known else None) for column, axis in enumerate(axes)]


def _is_small(part: Any) -> bool:
    numbers = isinstance(part.aval.dtype, np.dtype) and part.aval.dtype.kind in "biuf"
    return numbers and math.prod(part.aval.shape) <= _MOST_NUMBERS
