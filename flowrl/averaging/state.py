"""States of agents and messages between them, exact as JSON and as bytes; nothing is pickled.

In JSON an array is `{"$array": [dtype, shape, base64 of its bytes]}` and a number that is not
finite `{"$float": "nan"}`. As bytes, a message is the length of its header (8 bytes), the header
(that JSON, arrays with dtype and shape alone) and the arrays' bytes. Bytes are little endian. A
tuple comes back as a list, a NumPy scalar as an array without axes; arrays come back read-only.
"""

from __future__ import annotations

import json
import math
from binascii import a2b_base64, b2a_base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from io import BytesIO
from typing import Annotated, Any, Literal, Self, TypeAlias, cast

import numpy as np

from flowrl.errors import ConfigError
from flowrl.storage import records
from flowrl.storage.records import Natural

Tree: TypeAlias = "np.ndarray | Mapping[str, Tree]"
_INTS = [f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)]
_NAMES = ["bool", "float16", "float32", "float64", *_INTS]
_DTYPES = {name: np.dtype(name).newbyteorder("<") for name in _NAMES}
_LENGTH_BYTES = 8


def map_leaves(function: Callable[..., Any], tree: Any, *others: Any, path: str = "") -> Any:
    """The tree of what `function` makes of each array, and of those in its place in other trees.

    Keys are visited in their order. Raises ConfigError for what is no tree of arrays or is empty,
    and for trees with other keys or shapes.
    """
    form, *forms = (_form(each, path) for each in (tree, *others))
    for other in forms:
        if other != form:
            raise ConfigError(f"weights{path} are {other} instead of {form} as others'"[:200])
    if isinstance(form, tuple):
        return function(tree, *others)
    every = (tree, *others)
    return {k: map_leaves(function, *(each[k] for each in every), path=f"{path} {k}") for k in form}


def _form(tree: Any, path: str) -> tuple[int, ...] | list[str]:
    """The shape of an array, the keys of a dict in their order."""
    if isinstance(tree, np.ndarray):
        return tree.shape
    if isinstance(tree, Mapping) and tree and all(isinstance(key, str) for key in tree):
        return sorted(tree)
    raise ConfigError(f"weights{path} are neither a NumPy array nor a dict of such by name")


def to_row(tree: Tree, like: Tree, least: type = np.float64) -> np.ndarray:
    """The numbers of a tree of floats as one vector `[d]`, of type `least` or a wider one.

    Raises ConfigError unless keys, shapes and dtypes are those of `like`, floats, and not empty.
    """
    parts: list[np.ndarray] = []

    def add(known: np.ndarray, leaf: np.ndarray) -> None:
        if leaf.dtype != known.dtype or leaf.dtype.kind != "f":
            raise ConfigError(f"weights are {leaf.dtype}, others' {known.dtype}; use floats alike")
        parts.append(leaf.ravel())

    map_leaves(add, like, tree)
    row = np.concatenate(parts, dtype=np.result_type(least, *parts))
    if not row.size:
        raise ConfigError("weights hold no numbers; give each agent one at least")
    return row


def from_row(row: np.ndarray, like: Tree) -> Tree:
    """The read-only tree of the form of `like` with the numbers of a vector `[d]`."""
    left = row

    def take(leaf: np.ndarray) -> np.ndarray:
        nonlocal left
        taken, left = np.split(left, [leaf.size])
        taken = taken.reshape(leaf.shape).astype(leaf.dtype, copy=False)
        taken.flags.writeable = False
        return taken

    return map_leaves(take, like)


class _Exchanged:
    """The forms of a dataclass; what is malformed, cut or too long is refused by ConfigError."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        return _encode(self, lambda array: [b2a_base64(array.data, newline=False).decode()])

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(self.to_dict())

    def to_bytes(self) -> bytes:
        """A JSON header and the arrays' bytes."""
        arrays: list[Any] = []
        header = json.dumps(_encode(self, lambda array: arrays.append(array.data) or [])).encode()
        return b"".join([len(header).to_bytes(_LENGTH_BYTES, "little"), header, *arrays])

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`."""
        return cls._decoded(document, _from_base64)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The inverse of `to_json`."""
        return cls._decoded(text, _from_base64)

    @classmethod
    def from_bytes(cls, content: bytes) -> Self:
        """The inverse of `to_bytes`."""
        end = _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES], "little")
        arrays = BytesIO(content[end:])
        value = cls._decoded(content[_LENGTH_BYTES:end], arrays.read)
        if more := arrays.read():
            raise ConfigError(f"{cls.__name__} is {len(more)} bytes too long; send it again")
        return value

    @classmethod
    def _decoded(cls, document: Any, take: Callable[..., Any]) -> Self:
        try:
            text = document if isinstance(document, str | bytes) else json.dumps(document)
            fields = json.loads(text, object_hook=lambda each: _decode(each, take))
            return records.from_json(cls, fields)
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            line = " ".join(str(error).split())[:300]
            raise ConfigError(f"{cls.__name__} is malformed: {line}; send it again") from error


def _from_base64(_: int, text: str) -> bytes:
    return a2b_base64(text, strict_mode=True)


def _number(value: Any) -> float:
    if type(value) not in (int, float):
        raise ValueError("must be a number")
    return float(value)


_Tree = Annotated[Any, lambda value: map_leaves(lambda leaf: leaf, value)]
_Values = Annotated[Mapping[str, Any], dict]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AgentState(_Exchanged):
    """An agent's weights, and gradients and loss of its last step, None before the first."""

    agent_id: str
    weights: _Tree
    gradients: _Tree | None = None
    loss: Annotated[Any, _number] | None = None
    iteration: Natural = 0
    metadata: _Values = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SyncMessage(_Exchanged):
    """A message of one agent to others; ordered by round and source, the timestamp is for eyes."""

    source_id: str
    target_ids: tuple[str, ...] = ()
    message_type: Literal["weights", "gradients", "loss", "state"]
    payload: _Values
    timestamp: float = 0.0
    round: Natural = 0


def _encode(value: Any, put: Callable[[np.ndarray], list[Any]]) -> Any:
    """A value as JSON; `put` returns what stands there for the bytes of an array."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, list | tuple):
        return [_encode(item, put) for item in value]
    if isinstance(value, _Exchanged):
        value = {each.name: getattr(value, each.name) for each in fields(cast(Any, value))}
    if isinstance(value, Mapping) and all(isinstance(key, str) and key[:1] != "$" for key in value):
        return {key: _encode(item, put) for key, item in value.items()}
    array = value if isinstance(value, np.ndarray | np.generic) else np.array(None)
    if (name := array.dtype.name) not in _DTYPES:
        raise ConfigError(
            f"a message cannot hold {type(value).__name__} ({name}); use arrays of numbers, "
            "numbers, text, lists, and dicts with keys of text that begin without $"
        )
    plain = np.ascontiguousarray(array, _DTYPES[name]).reshape(-1).view(np.uint8)
    return {"$array": [name, list(array.shape), *put(plain)]}


def _decode(value: dict[str, Any], take: Callable[..., Any]) -> Any:
    """Return the value of a JSON object; `take` returns the bytes of an array."""
    match value:
        case {"$float": "nan" | "inf" | "-inf" as text}:
            return float(text)
        case {"$array": [str(name), list(shape), *text]}:
            if name not in _DTYPES or not all(type(n) is int and n >= 0 for n in shape):
                raise ValueError(f"an array has dtype {name[:20]!r} and shape {str(shape)[:60]}")
            needed = math.prod(shape) * _DTYPES[name].itemsize
            content = take(needed, *text)
            if len(content) != needed:
                raise ValueError(f"an array needs {needed} bytes and has {len(content)}")
            return np.frombuffer(content, _DTYPES[name]).reshape(shape)
    if any(key.startswith("$") for key in value):
        raise ValueError(f"no array or number is written {repr(value)[:80]}")
    return value
