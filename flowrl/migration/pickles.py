"""Reads pickles without unpickling: opcodes are listed, and a few of them are acted on here.

A pickle is a program. This reader runs none of it: it knows the opcodes that build plain containers
and, of all the names a pickle can call, the few by which NumPy and JAX arrays are written. Those
names stand for functions of this module that put bytes beside a shape. Nothing is imported, nothing
that grows by repeating is built, and what is not known is refused.
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flowrl import durable
from flowrl.errors import FileRefusedError
from flowrl.migration.stored import Called, Refusal, StoredArray, StoredDtype, admitted, encoded

PICKLE_LIMIT_BYTES = 2**30
OPCODE_LIMIT = 2_000_000
_KEY_LIMIT = 2**53


def read_pickle(path: Path) -> Any:
    """The plain containers, numbers, texts and `StoredArray`s in a pickle.

    Raises:
      FileRefusedError: the file is too large, cut short, or asks for anything else.
    """
    size = path.lstat().st_size if path.exists() else 0
    payload = durable.read_bytes(path, limit_bytes=min(size, PICKLE_LIMIT_BYTES))
    try:
        return _Reader(payload).read()
    except Refusal as refusal:
        raise FileRefusedError(
            f"{path} is refused: {refusal}; restore it, or move it away to migrate without it"
        ) from refusal


class _Reader:
    """A stack and a memo, as in the pickle format; `spare` bounds text that is made into bytes."""

    def __init__(self, payload: bytes) -> None:
        self._payload = payload
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._spare = len(payload)

    def read(self) -> Any:
        """Act on every opcode up to STOP, which must be the last byte."""
        end = None
        try:
            for count, (opcode, arg, place) in enumerate(pickletools.genops(self._payload)):
                if count >= OPCODE_LIMIT:
                    raise Refusal(f"it has over {OPCODE_LIMIT} opcodes")
                self._act(opcode.name, arg)
                end = place
        except (ValueError, OverflowError, MemoryError, struct.error) as error:
            raise Refusal("it is cut short, or no pickle") from error
        if end is None or end + 1 != len(self._payload):
            raise Refusal("something stands behind its end")
        value = self._pop()
        if self._stack or self._marks:
            raise Refusal("it is malformed")
        return value

    def _act(self, name: str, arg: Any) -> None:
        if name in _LITERALS:
            self._stack.append(arg)
        elif name in _FRESH:
            self._stack.append(_FRESH[name]())
        elif name in _ACTS:
            _ACTS[name](self, arg)
        elif name not in _SILENT:
            raise Refusal(f"the opcode {name} can run code or is not used by arrays")

    def _pop(self) -> Any:
        if len(self._stack) <= (self._marks[-1] if self._marks else 0):
            raise Refusal("it is malformed")
        return self._stack.pop()

    def _top(self, kind: type) -> Any:
        if len(self._stack) <= (self._marks[-1] if self._marks else 0):
            raise Refusal("it is malformed")
        if type(self._stack[-1]) is not kind:
            raise Refusal("it adds to something that is no container")
        return self._stack[-1]

    def _since_mark(self) -> list[Any]:
        if not self._marks:
            raise Refusal("it is malformed")
        start = self._marks.pop()
        items = self._stack[start:]
        del self._stack[start:]
        return items

    def _mark(self, _: Any) -> None:
        self._marks.append(len(self._stack))

    def _tuple(self, _: Any) -> None:
        self._stack.append(tuple(self._since_mark()))

    def _list(self, _: Any) -> None:
        self._stack.append(self._since_mark())

    def _dict(self, _: Any) -> None:
        items = self._since_mark()
        self._stack.append({})
        self._set_items(items)

    def _short_tuple(self, size: int) -> None:
        items = [self._pop() for _ in range(size)]
        self._stack.append(tuple(reversed(items)))

    def _append(self, _: Any) -> None:
        item = self._pop()
        self._top(list).append(item)

    def _appends(self, _: Any) -> None:
        items = self._since_mark()
        self._top(list).extend(items)

    def _set_item(self, _: Any) -> None:
        value, key = self._pop(), self._pop()
        self._set_items([key, value])

    def _sets_items(self, _: Any) -> None:
        self._set_items(self._since_mark())

    def _set_items(self, items: list[Any]) -> None:
        if len(items) % 2:
            raise Refusal("it is malformed")
        target = self._top(dict)
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) is not str and not (type(key) is int and abs(key) < _KEY_LIMIT):
                raise Refusal("a key is neither a text nor a small number")
            target[key] = value

    def _get(self, place: int) -> None:
        if place not in self._memo:
            raise Refusal("it is malformed")
        self._stack.append(self._memo[place])

    def _put(self, place: int) -> None:
        if not self._stack:
            raise Refusal("it is malformed")
        self._memo[place] = self._stack[-1]

    def _memoize(self, _: Any) -> None:
        self._put(len(self._memo))

    def _global(self, words: str) -> None:
        module, _, name = words.partition(" ")
        self._stack.append(admitted(module, name))

    def _stack_global(self, _: Any) -> None:
        name, module = self._pop(), self._pop()
        self._stack.append(admitted(module, name))

    def _reduce(self, _: Any) -> None:
        args, called = self._pop(), self._pop()
        if type(args) is not tuple or not isinstance(called, Called) or called.call is None:
            raise Refusal("it calls something that is no name")
        if called.call is encoded:
            self._spare -= len(args[0]) if args and type(args[0]) is str else 0
            if self._spare < 0:
                raise Refusal("it makes more bytes than it has")
        try:
            self._stack.append(called.call(*args))
        except TypeError as error:
            raise Refusal(f"{called.name} is called in an unknown way") from error

    def _build(self, _: Any) -> None:
        state = self._pop()
        if not self._stack or not isinstance(self._stack[-1], StoredArray | StoredDtype):
            raise Refusal("it sets the state of something that is no array")
        self._stack[-1].build(state)


_NUMBERS = "INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT"
_TEXTS = """
UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8
"""
_LITERALS = frozenset((_NUMBERS + _TEXTS).split())
_SILENT = frozenset({"PROTO", "FRAME", "STOP"})
_FRESH: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_TUPLE": tuple,
}
_ACTS: dict[str, Callable[[_Reader, Any], None]] = {
    "MARK": _Reader._mark,
    "TUPLE": _Reader._tuple,
    "TUPLE1": lambda reader, _: reader._short_tuple(1),
    "TUPLE2": lambda reader, _: reader._short_tuple(2),
    "TUPLE3": lambda reader, _: reader._short_tuple(3),
    "LIST": _Reader._list,
    "DICT": _Reader._dict,
    "APPEND": _Reader._append,
    "APPENDS": _Reader._appends,
    "SETITEM": _Reader._set_item,
    "SETITEMS": _Reader._sets_items,
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), _Reader._get),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), _Reader._put),
    "MEMOIZE": _Reader._memoize,
    "GLOBAL": _Reader._global,
    "STACK_GLOBAL": _Reader._stack_global,
    "REDUCE": _Reader._reduce,
    "BUILD": _Reader._build,
}
