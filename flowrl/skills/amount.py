"""Amounts of items, as skill files write them: a number, or a line in the count n."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from flowrl.errors import SkillError

_LIMIT = 1_000  # of each coefficient
_TEXT_LIMIT = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """The amount of an item at count n: `per * n + base`, never negative for n ≥ 1.

    It is divided by `over` and rounded up, where one piece of an item yields several of another.

    >>> Amount.parse("lambda n: 4*n + 0").at(2)
    8
    >>> str(Amount.parse("1 + 4 * n"))
    '4*n + 1'
    >>> Amount.parse("ceil(n/4)").at(5)
    2
    """

    per: int
    base: int
    over: int = 1

    def __post_init__(self) -> None:
        if (
            not 0 <= self.per <= _LIMIT
            or abs(self.base) > _LIMIT
            or not 0 < self.over <= _LIMIT
            or self.at(1) < 0
        ):
            what = f"the amount {self} is negative, over {_LIMIT} or divided by 0"
            raise SkillError(f"{what}; correct it")

    def __bool__(self) -> bool:
        return self.per > 0 or self.base > 0

    def __str__(self) -> str:
        if self.per == 0:
            return str(self.at(1))
        linear = "n" if self.per == 1 else f"{self.per}*n"
        sign = "-" if self.base < 0 else "+"
        linear = f"{linear} {sign} {abs(self.base)}" if self.base else linear
        if self.over == 1:
            return linear
        return f"ceil(({linear})/{self.over})" if self.base else f"ceil({linear}/{self.over})"

    def at(self, n: int) -> int:
        """The amount at count `n`."""
        return -(-(self.per * n + self.base) // self.over)

    def least_n(self, need: int) -> int | None:
        """The least count ≥ 1 whose amount is at least `need`; None when no count will do."""
        if self.at(1) >= need:
            return 1
        least = (need - 1) * self.over + 1  # of what is divided
        return None if self.per == 0 else -((self.base - least) // self.per)

    @staticmethod
    def parse(written: object) -> Amount:
        """The amount in a number or a text such as `n`, `4*n + 1` or `ceil(n/4)`."""
        text = str(written).strip()
        remedy = "write '4*n + 1', or 'ceil(n/4)' where one yields four"
        if len(text) > _TEXT_LIMIT:
            raise SkillError(f"{text[:40]!r}… is not an amount; {remedy}")
        try:
            node = ast.parse(text, mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise SkillError(f"{text!r} is not an amount; {remedy}") from error
        if isinstance(node, ast.Lambda) and ast.unparse(node.args) == "n":
            node = node.body
        over = 1
        match node:
            case ast.Call(
                func=ast.Name(id="ceil"),
                args=[ast.BinOp(left=inner, op=ast.Div(), right=ast.Constant(value=int(over)))],
                keywords=[],
            ):
                node = inner
        linear = _linear(node)
        if linear is None:
            raise SkillError(
                f"{text!r} is no whole number of 0 or more, and not linear in n; {remedy}"
            )
        return Amount(per=linear[0], base=linear[1], over=over)


def _linear(node: ast.expr) -> tuple[int, int] | None:
    """The coefficients (per, base) of an expression in n; None when it is not linear."""
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            whole = abs(value) <= _LIMIT and value == int(value)
            return (0, int(value)) if whole else None
        case ast.Name(id="n"):
            return 1, 0
        case ast.BinOp(left=left, op=op, right=right):
            one, other = _linear(left), _linear(right)
            if one is None or other is None:
                return None
            if isinstance(op, ast.Add | ast.Sub):
                sign = 1 if isinstance(op, ast.Add) else -1
                return one[0] + sign * other[0], one[1] + sign * other[1]
            if isinstance(op, ast.Mult) and not (one[0] and other[0]):
                return one[0] * other[1] + other[0] * one[1], one[1] * other[1]
    return None
