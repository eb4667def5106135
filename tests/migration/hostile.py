"""Pickles that do harm to whoever unpickles them, by what they try.

Those that can run code would make the file `canary` in the working folder.
"""

from __future__ import annotations

import builtins
import codecs
import copyreg
import ctypes
import io
import operator
import os
import pickle
import struct
import subprocess
from collections.abc import Callable
from typing import Any

import numpy as np

CANARY = "canary"
_TOUCH = f"touch {CANARY}"
_CODE = f"open({CANARY!r}, 'w')"


class Calls:
    """Pickles as a call."""

    def __init__(self, called: Callable[..., Any], *args: Any) -> None:
        self._reduced = called, args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._reduced


class Stateful:
    """Pickles as an object whose state is set."""


class WithState:
    def __reduce__(self):
        return np.dtype, ("f4", False, True), {"__class__": "x"}


class Persistent(pickle.Pickler):
    def persistent_id(self, obj):
        return "anything" if obj == "mark" else None


def _dumped(value: Any, protocol: int = 4) -> bytes:
    return pickle.dumps(value, protocol=protocol)


def _persistent(protocol: int) -> bytes:
    buffer = io.BytesIO()
    Persistent(buffer, protocol=protocol).dump(["mark"])
    return buffer.getvalue()


def _text(words: str) -> bytes:
    return b"\x8c" + bytes([len(words)]) + words.encode()


def _named(module: str, name: str) -> bytes:
    return _text(module) + _text(name) + b"\x93"


def _array(shape: tuple[int, ...], raw: bytes, *, code: str = "f4", blank: str = "b") -> bytes:
    """An array as NumPy pickles it, with a shape and bytes that need not fit."""
    rebuilt = _named("numpy._core.multiarray", "_reconstruct") + _named("numpy", "ndarray")
    start = rebuilt + b"K\x00\x85C\x01" + blank.encode() + b"\x87R(K\x01("
    sizes = b"".join(b"\x8a\x08" + struct.pack("<q", size) for size in shape)
    dtype = _named("numpy", "dtype") + _text(code) + b"\x89\x88\x87R"
    dtype += b"(K\x03" + _text("<") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    content = b"B" + struct.pack("<I", len(raw)) + raw
    return start + sizes + b"t" + dtype + b"\x89" + content + b"tb"


def _whole(body: bytes, protocol: int = 4) -> bytes:
    return b"\x80" + bytes([protocol]) + body + b"."


def _deep(levels: int) -> bytes:
    return _whole(b"]" * levels + b"a" * (levels - 1))


_HONEST = _dumped({"a": np.ones((3, 3), np.float32)})
_TEXT = "x" * 200

HOSTILE: dict[str, bytes] = {
    "os.system": _dumped(Calls(os.system, _TOUCH)),
    "os.system by its other module": _whole(_named("os", "system") + _text(_TOUCH) + b"\x85R"),
    "subprocess.Popen": _dumped(Calls(subprocess.Popen, ["touch", CANARY])),
    "subprocess.check_output": _dumped(Calls(subprocess.check_output, ["touch", CANARY])),
    "eval": _dumped(Calls(eval, _CODE)),
    "exec": _dumped(Calls(exec, _CODE)),
    "compile": _dumped(Calls(compile, _CODE, "x", "exec")),
    "open": _dumped(Calls(open, CANARY, "w")),
    "__import__": _dumped(Calls(builtins.__import__, "os")),
    "getattr": _dumped(Calls(getattr, "", "join")),
    "getattr chain": _dumped(Calls(getattr, Calls(__import__, "os"), "system")),
    "setattr": _dumped(Calls(setattr, Stateful(), "x", 1)),
    "operator.attrgetter": _dumped(operator.attrgetter("system")),
    "operator.methodcaller": _dumped(operator.methodcaller("system", _TOUCH)),
    "builtins.bytearray": _dumped(Calls(bytearray, 2**40)),
    "builtins.map": _dumped(Calls(map, eval, [_CODE])),
    "builtins.range as a bomb": _dumped(Calls(list, range(10**9))),
    "copyreg._reconstructor": _dumped(Stateful(), 0),
    "copyreg.__newobj__": _whole(
        _named("copyreg", "__newobj__") + _named("os", "times") + b"\x85R"
    ),
    "copyreg.add_extension": _dumped(Calls(copyreg.add_extension, "os", "system", 7)),
    "numpy.load": _dumped(Calls(np.load, "x.npy", None, True)),
    "numpy.save": _dumped(Calls(np.save, CANARY, 1)),
    "numpy.fromfile": _whole(_named("numpy", "fromfile") + _text("/etc/passwd") + b"\x85R"),
    "numpy.memmap": _whole(_named("numpy", "memmap") + _text(CANARY) + b"\x85R"),
    "numpy's own exec": _whole(_named("numpy.testing._private.utils", "runstring") + b")R"),
    "an object array": _dumped(np.array([Calls(os.system, _TOUCH)], dtype=object)),
    "an object array by protocol 2": _dumped(np.array([{}, []], dtype=object), 2),
    "an empty object array": _dumped(np.array([], dtype=object)),
    "a structured array": _dumped(np.zeros(2, [("a", "f4"), ("b", "O")])),
    "a text array": _dumped(np.array(["abc"])),
    "an array of void": _dumped(np.zeros(2, "V8")),
    "a datetime array": _dumped(np.zeros(2, "M8[s]")),
    "a subclass of arrays": _dumped(np.ma.masked_array([1.0, 2.0], [False, True])),
    "a numpy scalar of objects": _whole(
        _named("numpy._core.multiarray", "scalar")
        + _named("numpy", "dtype")
        + _text("O8")
        + b"\x89\x88\x87RC\x01x\x86R"
    ),
    "ctypes": _dumped(Calls(ctypes.CDLL, "libc.so.6")),
    "a code object's type": _whole(_named("types", "CodeType") + b")R"),
    "a function's type": _whole(_named("types", "FunctionType") + b")R"),
    "opcode INST": b"(S'" + _TOUCH.encode() + b"'\nios\nsystem\n.",
    "opcode OBJ": b"(cos\nsystem\nS'" + _TOUCH.encode() + b"'\no.",
    "opcode GLOBAL and REDUCE": b"cos\nsystem\n(V" + _TOUCH.encode() + b"\ntR.",
    "opcode NEWOBJ": _dumped(Stateful(), 2),
    "opcode NEWOBJ of an admitted name": _whole(_named("numpy", "ndarray") + b"K\x02\x85\x81"),
    "opcode NEWOBJ_EX": _whole(_named("numpy", "ndarray") + b")}\x92"),
    "opcode BUILD on a dict": _whole(b"}}" + _text("x") + b"K\x01sb"),
    "opcode BUILD with attributes": _dumped(WithState()),
    "a persistent id": _persistent(0),
    "a binary persistent id": _persistent(4),
    "extension 1": _whole(b"\x82\x01"),
    "extension 2": _whole(b"\x83\x01\x00"),
    "extension 4": _whole(b"\x84\x01\x00\x00\x00"),
    "a buffer from outside": _whole(b"\x97", 5),
    "a read-only buffer from outside": _whole(b"\x97\x98", 5),
    "a name with dots": _whole(_named("numpy", "ndarray.__reduce__")),
    "a name that is no text": _whole(b"K\x01K\x02\x93"),
    "a call of what is no name": _whole(_text("os.system") + _text("x") + b"\x85R"),
    "a call of the array type": _whole(_named("numpy", "ndarray") + b"K\x05\x85\x85R"),
    "too many arguments": _whole(_named("numpy", "dtype") + b"(" + b"N" * 50 + b"tR"),
    "an array larger than its bytes": _whole(_array((2**30, 2**9), b"abcd")),
    "an array smaller than its bytes": _whole(_array((1,), b"abcdefgh")),
    "a negative size": _whole(_array((-1,), b"abcd")),
    "sizes whose product wraps": _whole(_array((2**32, 2**32), b"")),
    "too many dimensions": _whole(_array((1,) * 30, b"abcd")),
    "an array made twice": _whole(_array((1,), b"abcd")[:-1] + b"b(K\x01)NNNtb"),
    "text made into bytes again and again": _dumped(
        [Calls(codecs.encode, _TEXT, "latin1") for _ in range(300)]
    ),
    "a key that is a list": _whole(b"}]N\x73".replace(b"\x73", b"s")),
    "a key that is a tuple": _whole(b"}(NNt\x4es".replace(b"\x4e", b"N")),
    "a huge key": _whole(b"}\x8a\x20" + b"\x01" * 32 + b"Ns"),
    "a dict added to a list": _whole(b"]NNs"),
    "a stack that runs empty": _whole(b"0"),
    "an unfinished mark": _whole(b"(N"),
    "a memo that was never written": _whole(b"h\x07"),
    "a memo at two billion": _whole(b"Nr\xff\xff\xff\x7f0j\xfe\xff\xff\x7f"),
    "bytes longer than the file": _whole(b"\x8e" + struct.pack("<Q", 2**62) + b"x"),
    "a number longer than the file": _whole(b"\x8b" + struct.pack("<i", 2**30) + b"x"),
    "a negative length": _whole(b"\x8b" + struct.pack("<i", -5)),
    "digits without end": b"I" + b"9" * 100_000 + b"\n.",
    "an unknown opcode": _whole(b"\xff"),
    "an unknown text": b"hello, I am no pickle",
    "nothing": b"",
    "something behind the end": _HONEST + b"cos\nsystem\n.",
    "two pickles": _HONEST + _HONEST,
    **{
        f"cut after {share} of 5 parts": _HONEST[: len(_HONEST) * share // 5]
        for share in range(1, 5)
    },
    "cut before its last byte": _HONEST[:-1],
    **{f"os.system by protocol {p}": _dumped(Calls(os.system, _TOUCH), p) for p in range(6)},
    **{f"an object by protocol {p}": _dumped(Stateful(), p) for p in range(6)},
}
DEEP = _deep(200_000)
MANY_OPCODES = _whole(b"]" + b"Na" * 1_100_000)
