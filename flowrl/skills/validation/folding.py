"""Constant folding of skill code; it stands alone as the one place that computes with literals.

`9**9**9` needs no feature, so the dry run would compute it until its time is over. Here each step
is bounded before it is computed.
"""

from __future__ import annotations

import ast
import math
import operator
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

BITS = 64
_MOST_ITEMS = 1_000_000  # of a list that is repeated
_OPERATORS: dict[type[ast.operator], Callable[..., int | float | complex]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
Number = int | float


class TooLargeError(Exception):
    """An expression of constants has a value that is too large."""

    def __init__(self, node: ast.AST) -> None:
        super().__init__()
        self.node = node


def constants(
    nodes: Sequence[ast.AST], parameters: Collection[str], outer: Mapping[str, Number]
) -> dict[str, Number]:
    """Return the values of the names that are assigned one constant, and `outer`'s others.

    Raises TooLargeError for a value of more than 64 bits, or a list that is too long.

    Args:
      nodes: all nodes of a function's body, in the order of the text.
      parameters: its parameters, whose values are not known.
      outer: the constants around the function.
    """
    names = [each for each in nodes if isinstance(each, ast.Name)]
    stored = [each.id for each in names if isinstance(each.ctx, ast.Store)]
    hidden = {*stored, *parameters}
    known = {name: value for name, value in outer.items() if name not in hidden}
    once = {name for name, times in Counter(stored).items() if times == 1} - {*parameters}
    for node in nodes:
        if isinstance(node, ast.Assign):  # before the parts of the next line
            match node.targets:
                case [ast.Name(id=name)] if name in once:
                    value = _value(node.value, known)
                    known |= {} if value is None else {name: value}
        elif isinstance(node, ast.BinOp):
            _value(node, known)
    return known


def _value(node: ast.expr, known: Mapping[str, Number]) -> Number | None:
    """Return the value of an expression of constants, None if it is none."""
    match node:
        case ast.Constant(value=int() | float() as value):
            return value
        case ast.Name(id=name):
            return known.get(name)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value = _value(operand, known)
            return None if value is None else -value
        case ast.BinOp(left=left, right=right):
            _check_repeated(node, known)
            first, second = _value(left, known), _value(right, known)
            return None if first is None or second is None else _computed(node, first, second)
    return None


def _computed(node: ast.BinOp, first: Number, second: Number) -> Number | None:
    power = isinstance(node.op, ast.Pow) and abs(first) > 1
    if power and second * math.log2(abs(first)) > BITS:
        raise TooLargeError(node)
    if type(node.op) not in _OPERATORS:
        return None
    try:
        value = _OPERATORS[type(node.op)](first, second)
    except ArithmeticError:
        return None  # the dry run says which
    if isinstance(value, complex):
        return None
    if abs(value) >= 2**BITS:
        raise TooLargeError(node)
    return value


def _check_repeated(node: ast.BinOp, known: Mapping[str, Number]) -> None:
    for items, times in ((node.left, node.right), (node.right, node.left)):
        match node.op, items:
            case ast.Mult(), ast.List(elts=parts) | ast.Tuple(elts=parts):
                if len(parts) * (_value(times, known) or 0) > _MOST_ITEMS:
                    raise TooLargeError(node)
