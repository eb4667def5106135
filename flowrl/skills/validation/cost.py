"""What skill code costs before it is traced: how large whole numbers grow, what loops repeat.

Python's whole numbers have no bound: one that is squared again and again fills the memory of the
process that computes it, and it is computed while JAX traces, where no budget of JAX's holds. So
the statements are walked as they would run, with an upper bound of bits in place of each number.
Arrays and floats have a fixed width and are FIXED; the dry run says how large arrays grow, because
it traces them without making them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping

from flowrl.skills.validation.allowed import CALLS, refusal

BITS_LIMIT = 16_384  # of one whole number
WORK_LIMIT = 20_000  # pieces of syntax, each counted as often as loops repeat it
FIXED = None  # an array or a float: no number that grows

_COUNT_BITS = 10
_FLOAT_BITS = 1_024  # int(x) of the largest float
_SIZE_BITS = 32  # what len() and an array's size have at most
_ITEM_BITS = 16  # of an enum's member

Bits = int | None
_Names = dict[str, Bits]


def check_growth(body: Iterable[ast.stmt], *, parameters: frozenset[str], place: str) -> None:
    """Refuse a body whose whole numbers may outgrow BITS_LIMIT, or whose loops do too much.

    Raises:
      CodeRefusedError: with the line and the remedy.
    """
    names: _Names = dict.fromkeys(parameters, FIXED)
    if "n" in names:
        names["n"] = _COUNT_BITS
    _Walk(place).block(body, names)


class _Walk:
    """One function as it would run, with bounds in the place of numbers."""

    def __init__(self, place: str) -> None:
        self.place = place
        self.work = 0

    def block(self, body: Iterable[ast.stmt], names: _Names) -> None:
        for statement in body:
            self.statement(statement, names)

    def statement(self, node: ast.stmt, names: _Names) -> None:
        self.count(1, node)
        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    self.assign(target, value, names)
            case ast.AugAssign(target=ast.Name(id=name), op=op, value=value):
                bits = self.operation(op, names.get(name, FIXED), value, names)
                names[name] = self.bounded(bits, node)
            case ast.If(test=test, body=body, orelse=orelse):
                self.value(test, names)
                other = dict(names)
                self.block(body, names)
                self.block(orelse, other)
                names |= _joined(names, other)
            case ast.For():
                self.loop(node, names)
            case ast.Return(value=ast.expr() as value):
                self.value(value, names)
            case _:
                pass

    def loop(self, node: ast.For, names: _Names) -> None:
        times = _rounds(node)
        for done in range(times):
            before, spent = dict(names), self.work
            self.bind(node.target, 7, names)
            self.block(node.body, names)
            names |= _joined(before, names)
            if names == before:  # so it stays: only the work is still to be counted
                self.count((times - done - 1) * (self.work - spent), node)
                return

    def assign(self, target: ast.expr, value: ast.expr, names: _Names) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple | ast.List):
            bits = [self.value(part, names) for part in value.elts]
            for part, width in zip(target.elts, bits, strict=False):
                self.bind(part, width, names)
        else:
            self.bind(target, self.value(value, names), names)

    def bind(self, target: ast.expr, bits: Bits, names: _Names) -> None:
        if isinstance(target, ast.Name):
            names[target.id] = bits
        elif isinstance(target, ast.Tuple):  # an array comes apart into arrays
            for part in target.elts:
                self.bind(part, FIXED, names)

    def value(self, node: ast.AST, names: _Names) -> Bits:
        self.count(1, node)
        return self.bounded(self.width(node, names), node)

    def width(self, node: ast.AST, names: _Names) -> Bits:
        match node:
            case ast.Constant(value=int() as number):
                return number.bit_length()
            case ast.Name(id=name):
                return names.get(name, FIXED)
            case ast.BinOp(left=left, op=op, right=right):
                return self.operation(op, self.value(left, names), right, names)
            case ast.Call():
                return self.call(node, names)
            case ast.Attribute(attr=attribute):
                return self.attribute(attribute, node, names)
            case _:
                return self.rest(node, names)

    def rest(self, node: ast.AST, names: _Names) -> Bits:
        parts = [self.value(part, names) for part in _values(node)]
        match node:
            case ast.Compare():
                return 1
            case ast.UnaryOp():
                return _plus(_most(parts), 1)
            case ast.IfExp() | ast.BoolOp() | ast.Tuple() | ast.List():
                return _most(parts)
            case _:
                return FIXED  # floats, and parts of arrays

    def attribute(self, attribute: str, node: ast.Attribute, names: _Names) -> Bits:
        if attribute in {"size", "ndim"}:
            self.value(node.value, names)
            return _SIZE_BITS
        return _ITEM_BITS if attribute == "value" else FIXED

    def call(self, node: ast.Call, names: _Names) -> Bits:
        given = (*node.args, *(keyword.value for keyword in node.keywords))
        bits = _most([self.value(part, names) for part in given])
        function = node.func
        if isinstance(function, ast.Attribute):
            self.value(function.value, names)
        if not (isinstance(function, ast.Name) and function.id in CALLS):
            return FIXED
        match function.id:
            case "len":
                return _SIZE_BITS
            case "bool":
                return 1
            case "int":
                return _FLOAT_BITS if bits is None else bits
            case "float":
                return FIXED
            case _:
                return bits

    def operation(self, op: ast.operator, left: Bits, right: ast.expr, names: _Names) -> Bits:
        other = self.value(right, names)
        if isinstance(op, ast.Pow):
            return _power(left, right)
        if left is None or other is None or isinstance(op, ast.Div):
            return FIXED
        match op:
            case ast.Mult():
                return left + other
            case ast.FloorDiv():
                return left + 1
            case ast.Mod():
                return other + 1
            case _:
                return max(left, other) + 1

    def bounded(self, bits: Bits, node: ast.AST) -> Bits:
        if bits is not None and bits > BITS_LIMIT:
            what = f"a whole number may grow over {BITS_LIMIT} bits"
            raise refusal(self.place, node, what, "keep it small, or compute with jnp")
        return bits

    def count(self, pieces: int, node: ast.AST) -> None:
        self.work += pieces
        if self.work > WORK_LIMIT:
            what = f"loops repeat over {WORK_LIMIT} pieces of code"
            raise refusal(self.place, node, what, "use jnp over whole arrays instead")


def _rounds(loop: ast.For) -> int:
    """The literal k of `range(k)`, which is all that loops run over."""
    call = loop.iter
    limit = call.args[0] if isinstance(call, ast.Call) and call.args else None
    times = limit.value if isinstance(limit, ast.Constant) else 0
    return times if isinstance(times, int) else 0


def _values(node: ast.AST) -> list[ast.expr]:
    return [part for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)]


def _power(left: Bits, exponent: ast.expr) -> Bits:
    """Whole numbers stay whole under whole exponents from 0 on."""
    value = exponent.value if isinstance(exponent, ast.Constant) else None
    return left * max(1, value) if left is not None and isinstance(value, int) else FIXED


def _plus(bits: Bits, more: int) -> Bits:
    return None if bits is None else bits + more


def _most(bits: Iterable[Bits]) -> Bits:
    """The bound of a value that is one of these; what may be a whole number counts as one."""
    known = [width for width in bits if width is not None]
    return max(known) if known else FIXED


def _joined(some: Mapping[str, Bits], others: Mapping[str, Bits]) -> _Names:
    return {name: _most([some.get(name), others.get(name)]) for name in {*some, *others}}
