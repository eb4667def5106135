"""What the names in a pickle stand for here: bytes beside a shape, and nothing that runs.

Of all the names a pickle can call, those by which NumPy and JAX write arrays are admitted, each as
a small function of this module.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_RANK_LIMIT = 8
_SIZE_LIMIT = 2**40
_DTYPE = re.compile(r"[bfiu][1248]")
_SCALARS = {"f4": "f", "f8": "d", "i4": "i", "i8": "q", "b1": "?"}
_NAME = re.compile(r"[A-Za-z0-9_.]{1,80}")


class Refusal(Exception):  # noqa: N818 - a pickle's, told as a FileRefusedError
    """Why a pickle is not read."""


@dataclass(slots=True)
class StoredDtype:
    """A kind and width of number, such as "f4", and its byte order."""

    code: str
    order: str = "<"

    def build(self, state: Any) -> None:
        """Take the byte order that NumPy stores beside the code."""
        if not isinstance(state, tuple) or len(state) not in (8, 9) or state[2:5] != (None,) * 3:
            raise Refusal("an array's number format is not a plain one")
        if state[1] not in ("<", ">", "|", "="):
            raise Refusal("an array's byte order is unknown")
        self.order = state[1]

    @property
    def itemsize(self) -> int:
        """The bytes of one number."""
        return int(self.code[1])


@dataclass(slots=True)
class StoredArray:
    """The bytes of an array as a pickle holds them, known to be as many as its shape needs."""

    shape: tuple[int, ...] = ()
    dtype: StoredDtype | None = None
    fortran: bool = False
    raw: bytes | None = None

    def build(self, state: Any) -> None:
        """Take what NumPy stores of an array: version, shape, number format, order, bytes."""
        if self.raw is not None or not isinstance(state, tuple) or len(state) != 5:
            raise Refusal("an array is not stored as NumPy stores it")
        _, shape, dtype, fortran, raw = state
        self.fill(shape, dtype, fortran is True, raw)

    def fill(self, shape: Any, dtype: Any, fortran: bool, raw: Any) -> None:
        """Take shape, number format and bytes, once it is sure that they fit one another."""
        if not isinstance(dtype, StoredDtype) or type(raw) not in (bytes, bytearray):
            raise Refusal("an array holds objects, not numbers")
        if not _is_shape(shape) or _volume(shape) * dtype.itemsize != len(raw):
            raise Refusal("an array's shape does not fit its bytes")
        self.shape, self.dtype, self.fortran, self.raw = shape, dtype, fortran, raw


@dataclass(frozen=True, slots=True)
class Called:
    """An admitted name, by what it does here; `call` is None for one that is only handed on."""

    name: str
    call: Callable[..., Any] | None


def _is_shape(shape: Any) -> bool:
    return (
        type(shape) is tuple
        and len(shape) <= _RANK_LIMIT
        and all(type(size) is int and 0 <= size <= _SIZE_LIMIT for size in shape)
    )


def _volume(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def _blank_array(kind: Any, shape: Any, code: Any) -> StoredArray:
    if kind is not _NDARRAY or shape != (0,) or code not in (b"b", "b"):
        raise Refusal("an array is not stored as NumPy stores it")
    return StoredArray()


def _dtype(code: Any, _align: Any = False, _copy: Any = False) -> StoredDtype:
    if type(code) is not str or not _DTYPE.fullmatch(code):
        raise Refusal("an array holds objects or texts, not numbers")
    return StoredDtype(code)


def _scalar(dtype: Any, raw: Any) -> Any:
    if not isinstance(dtype, StoredDtype) or dtype.code not in _SCALARS or type(raw) is not bytes:
        raise Refusal("a number is not stored as NumPy stores it")
    order = ">" if dtype.order == ">" else "<"
    return struct.unpack(order + _SCALARS[dtype.code], raw)[0]


def _from_buffer(raw: Any, dtype: Any, shape: Any, order: Any) -> StoredArray:
    if order not in ("C", "F"):
        raise Refusal("an array is not stored as NumPy stores it")
    array = StoredArray()
    array.fill(shape, dtype, order == "F", raw)
    return array


def encoded(text: Any, encoding: Any) -> bytes:
    """Bytes that older pickles hold as text."""
    if type(text) is not str or encoding != "latin1":
        raise Refusal("it converts text in an unknown way")
    return text.encode("latin1")


def _jax_array(rebuilt: Any, args: Any, state: Any, _facts: Any) -> StoredArray:
    if (
        not isinstance(rebuilt, Called)
        or rebuilt.call is not _blank_array
        or type(args) is not tuple
    ):
        raise Refusal("an array is not stored as JAX stores it")
    array = _blank_array(*args)
    array.build(state)
    return array


def _ordered(*items: Any) -> dict[str, Any]:
    if items:
        raise Refusal("a dictionary is stored in an unknown way")
    return {}


_NDARRAY = Called("numpy.ndarray", None)
_ADMITTED = {
    "numpy.core.multiarray._reconstruct": _blank_array,
    "numpy._core.multiarray._reconstruct": _blank_array,
    "numpy.core.multiarray.scalar": _scalar,
    "numpy._core.multiarray.scalar": _scalar,
    "numpy.core.numeric._frombuffer": _from_buffer,
    "numpy._core.numeric._frombuffer": _from_buffer,
    "numpy.dtype": _dtype,
    "jax._src.array._reconstruct_array": _jax_array,
    "collections.OrderedDict": _ordered,
    "_codecs.encode": encoded,
}


def admitted(module: Any, name: Any) -> Called:
    """What a name stands for here.

    Raises:
      Refusal: it is none of those by which arrays and plain containers are written.
    """
    if type(module) is not str or type(name) is not str:
        raise Refusal("it names something by what is no text")
    full = f"{module}.{name}"
    if full == _NDARRAY.name:
        return _NDARRAY
    if full not in _ADMITTED:
        said = full if _NAME.fullmatch(full) else "something"
        raise Refusal(f"it names {said}, which is neither an array nor a plain container")
    return Called(full, _ADMITTED[full])
