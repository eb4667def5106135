"""Amounts of items: linear in the count of a step, and never evaluated as code."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from flowrl.errors import SkillError

_LIMIT = 1_000  # of either coefficient
_TEXT_LIMIT = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """How much of an item at count n: `per * n + base`, never negative for n ≥ 1.

    >>> Amount.parse("lambda n: 4*n + 0").at(2)
    8
    >>> str(Amount.parse("1 + 4 * n"))
    '4*n + 1'
    """

    per: int
    base: int

    def __post_init__(self) -> None:
        if not 0 <= self.per <= _LIMIT or abs(self.base) > _LIMIT or self.per + self.base < 0:
            raise SkillError(f"the amount {self} is negative or over {_LIMIT}; correct it")

    def __bool__(self) -> bool:
        return self.per > 0 or self.base > 0

    def __str__(self) -> str:
        if self.per == 0:
            return str(self.base)
        linear = "n" if self.per == 1 else f"{self.per}*n"
        sign = "-" if self.base < 0 else "+"
        return f"{linear} {sign} {abs(self.base)}" if self.base else linear

    def at(self, n: int) -> int:
        """The amount at count `n`."""
        return self.per * n + self.base

    def least_n(self, need: int) -> int | None:
        """The least count ≥ 1 whose amount is at least `need`; None when no count will do."""
        if self.at(1) >= need:
            return 1
        return None if self.per == 0 else -((self.base - need) // self.per)

    @staticmethod
    def parse(written: object) -> Amount:
        """The amount in a number or a text such as `n`, `4*n + 1` or `lambda n: 4*n + 0`.

        Raises:
          SkillError: it is negative, absurd, not linear in n, or not an amount at all.
        """
        if isinstance(written, Amount):
            return written
        if isinstance(written, int | float) and not isinstance(written, bool):
            if not abs(written) <= _LIMIT or written != int(written):
                raise SkillError(f"{written!r} is not a whole number up to {_LIMIT}")
            return Amount(per=0, base=int(written))
        if not isinstance(written, str) or len(written) > _TEXT_LIMIT:
            raise SkillError(f"{str(written)[:40]!r} is not an amount; write {'4*n + 1'!r}")
        per, base = _linear(_expression(written), written)
        return Amount(per=per, base=base)


def _expression(written: str) -> ast.expr:
    try:
        node = ast.parse(written.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise SkillError(f"{written!r} is not an amount; write '4*n + 1'") from error
    match node:
        case ast.Lambda(
            args=ast.arguments(
                posonlyargs=[], args=[ast.arg(arg="n")], vararg=None, kwonlyargs=[], kwarg=None
            ),
            body=body,
        ):
            return body
    return node


def _linear(node: ast.expr, written: str) -> tuple[int, int]:
    """The coefficients (per, base) of an expression in n."""
    match node:
        case ast.Constant(value=int(value)) if type(value) is int and value <= _LIMIT:
            return 0, value
        case ast.Name(id="n"):
            return 1, 0
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() as op, right=right):
            (per, base), (other_per, other_base) = _linear(left, written), _linear(right, written)
            sign = 1 if isinstance(op, ast.Add) else -1
            return per + sign * other_per, base + sign * other_base
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            (per, base), (other_per, other_base) = _linear(left, written), _linear(right, written)
            if not per or not other_per:
                return per * other_base + other_per * base, base * other_base
    raise SkillError(f"{written!r} is not linear in n; write '4*n + 1'")
