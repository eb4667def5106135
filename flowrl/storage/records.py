"""The typed reader and writer of JSON records: a frozen dataclass goes to disk and comes back.

A record file is one JSON object with the key `format` and, last, `sha256`: the seal, a digest of
its own content. A flipped bit may still parse, as another number; the seal shows it. It guards
against accidents, not against people: whoever edits a file can seal it again.

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Order:
        skill: Annotated[str, display_name]  # a check that returns the value or raises ValueError
        expert: Natural
        rates: tuple[Share, ...] = ()        # a field with a default may be missing
        limit_seconds: float | None = None   # finite; NaN and Infinity are refused

    records.write(path, Order(skill="Collect Wood", expert=0))
    order = records.read(path, Order, remedy="run it again")

Types are exact: `1` is not a bool, `"1"` not a number, but `1` is a float. Unknown and missing keys
are refused. Fields are of the types in `_READERS`, dataclasses and Enums. Members of a union of
dataclasses have a `kind: ClassVar[str]`, written as the key `kind`. `__post_init__` may raise
ValueError for several fields together. FileRefusedError names file, key, value and remedy.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from flowrl.errors import FileRefusedError, FlowrlError, FormatVersionError
from flowrl.storage import READ_LIMIT_BYTES, json_object, read_bytes, read_json, write_atomic

SEAL = "sha256"
RESTORE = "restore it from a copy (flowrl fsck says what else is damaged)"
_MOST = 2**63 - 1
_LARGEST = 1e12  # seconds, steps: clocks and dates cannot show more
Record = TypeVar("Record")
Reader = Callable[[tuple[Any, ...], Any], Any]  # type's arguments, JSON value → field's value
Check = Callable[[Any], Any]  # returns the value, or raises ValueError


def write(path: Path, record: Any, *, durable: bool = True) -> None:
    """Write a dataclass, or a mapping of plain JSON values, as a sealed record of format 1."""
    write_atomic(path, encode(record), durable=durable)


def encode(record: Any) -> bytes:
    """Return the content of the file that `write` writes."""
    document = sealed({"format": 1, **to_json(record)})
    lines = ",\n".join(f"{json.dumps(key)}: {_lines(value)}" for key, value in document.items())
    return f"{{\n{lines}\n}}\n".encode()


def read(
    path: Path,
    kind: type[Record],
    *,
    sealed: bool = True,
    limit_bytes: int = READ_LIMIT_BYTES,
    remedy: str = RESTORE,
    content: bytes | None = None,
) -> Record:
    """Read a record of this dataclass; with `sealed=False` the seal may be missing.

    The `content` of the file is given if it was read already.
    FormatVersionError: its format is not 1. FileRefusedError: anything else; it says the `remedy`.
    """
    document = read_document(
        path, sealed=sealed, limit_bytes=limit_bytes, remedy=remedy, content=content
    )
    try:
        return from_json(kind, document)
    except MalformedError as error:
        raise FileRefusedError(f"{path} is malformed: {error}; {remedy}") from error


def read_document(
    path: Path,
    *,
    sealed: bool = True,
    limit_bytes: int = READ_LIMIT_BYTES,
    remedy: str = RESTORE,
    content: bytes | None = None,
) -> dict[str, Any]:
    """Read a record as plain JSON values, without `format` and seal; raises as `read` does."""
    if content is None and not sealed:  # a run's own: polls do not wait for a damaged one
        content = read_bytes(path, limit_bytes=limit_bytes, remedy=remedy)
    if content is None:
        document = read_json(path, limit_bytes=limit_bytes, remedy=remedy)
    else:
        document = json_object(path, content, remedy=remedy)
    if "format" not in document:
        raise FileRefusedError(f"{path} is no record of flowrl: it has no format; {remedy}")
    version = document.pop("format")
    if type(version) is not int or version != 1:
        raise FormatVersionError(
            f"{path} has format {version!r}, this flowrl reads 1; "
            "use the version of flowrl that wrote it"
        )
    seal = document.pop(SEAL, None)
    if seal is None and not sealed:
        return document
    if seal != _seal_of({"format": version, **document}):
        problem = "has no seal" if seal is None else "is not what its seal says"
        raise FileRefusedError(f"{path} is damaged or was edited: it {problem}; {remedy}")
    return document


def sealed(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON object with its seal, the sha256 of the rest, as the last key."""
    content = {key: value for key, value in document.items() if key != SEAL}
    return {**content, SEAL: _seal_of(content)}


def _seal_of(content: Mapping[str, Any]) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def to_json(value: Any) -> Any:
    """Return a record as plain JSON values.

    >>> to_json({"folder": Path("a"), "sizes": (1, 2)})
    {'folder': 'a', 'sizes': [1, 2]}
    """
    if is_dataclass(value) and not isinstance(value, type):
        tag = _kind_of(type(value))
        kind = {"kind": tag} if tag else {}
        return kind | {item.name: to_json(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [to_json(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
    return str(value) if isinstance(value, Path) else value


def from_json(kind: Any, value: Any) -> Any:
    """Return the value of type `kind` that `to_json` made this of; MalformedError names the key."""
    return _at("", kind, value)


class MalformedError(ValueError):
    """A value is not of the type, or not within the limits, of its field."""

    def __init__(self, problem: str, key: str = "") -> None:
        super().__init__(f"{key} {problem}".strip())
        self.problem, self.key = problem, key


def at_least(low: float) -> Check:
    """Return a check for the type of a field: a number from `low`."""
    return _check(lambda value: value >= low, f"must be at least {low:,}")


def at_most(high: float) -> Check:
    """Return a check for the type of a field: a number up to `high`."""
    return _check(lambda value: value <= high, f"must be at most {high:,}")


def above(low: float) -> Check:
    """Return a check for the type of a field: a number above `low`."""
    return _check(lambda value: value > low, f"must be above {low:g}")


def within(low: float, high: float) -> Check:
    """Return a check for the type of a field: a number from `low` to `high`."""
    return _check(lambda value: low <= value <= high, f"must lie in [{low:.12g}, {high:.12g}]")


def _check(holds: Callable[[Any], Any], problem: str) -> Check:
    def check(value: Any) -> Any:
        if not holds(value):
            raise ValueError(problem)
        return value

    return check


Natural = Annotated[int, at_least(0)]
Positive = Annotated[int, at_least(1)]
Share = Annotated[float, within(0.0, 1.0)]
# A word can be part of a path; a phase can be shown on a terminal.
_SURROGATE = re.compile("[\ud800-\udfff]")  # half a character, which no file can hold
_WORD, _PHASE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"), re.compile(r"[a-z]{1,20}")
Word = Annotated[str, _check(_WORD.fullmatch, "must be a plain word")]
Phase = Annotated[str, _check(_PHASE.fullmatch, "must be a word of lower-case letters")]


def _lines(value: Any) -> str:
    """Return JSON text, a list with one line for each item."""
    if not isinstance(value, list) or not value:
        return json.dumps(value, allow_nan=False)
    items = ",\n".join(json.dumps(item, allow_nan=False) for item in value)
    return f"[\n{items}\n]"


def _at(key: str, kind: Any, value: Any) -> Any:
    """Read a value of type `kind`; an error names the key below which it was found."""
    try:
        return _value(kind, value)
    except MalformedError as error:
        dot = "." if key and error.key and not error.key.startswith("[") else ""
        raise MalformedError(error.problem, f"{key}{dot}{error.key}") from error
    except (ValueError, TypeError, FlowrlError) as error:  # of a check, or of __post_init__
        raise MalformedError(f"is {repr(value)[:100]}: {error}", key) from error


def _value(kind: Any, value: Any) -> Any:
    origin, args = get_origin(kind) or kind, get_args(kind)
    if origin in _READERS:
        return _READERS[origin](args, value)
    return _record(kind, value) if is_dataclass(kind) else kind(value)  # else an Enum


def _expect(holds: bool, value: Any, expected: str) -> None:
    if not holds:
        raise MalformedError(f"is {repr(value)[:100]}, not {expected}")


def _plain(kind: type, expected: str) -> Reader:
    """Return the reader of a type that JSON has itself; no other type counts as it."""

    def read_plain(_: Any, value: Any) -> Any:
        _expect(type(value) is kind, value, expected)
        return value

    return read_plain


def _text(_: Any, value: Any) -> str:
    _expect(type(value) is str and not _SURROGATE.search(value), value, "text")
    return value


def _whole(_: Any, value: Any) -> int:
    _expect(type(value) is int and abs(value) <= _MOST, value, "a whole number of 64 bits")
    return value


def _finite(_: Any, value: Any) -> float:
    good = type(value) in (int, float) and abs(value) <= _LARGEST
    _expect(good, value, "a finite number up to 1e12")
    return float(value)


def _time(_: Any, value: Any) -> datetime:
    moment = datetime.fromisoformat(_value(str, value))
    _expect(moment.tzinfo is not None, value, "a time with its time zone")
    return moment.astimezone(UTC)


def _literal(args: tuple[Any, ...], value: Any) -> Any:
    _expect(value in args, value, "one of " + ", ".join(map(str, args)))
    return value


def _annotated(args: tuple[Any, ...], value: Any) -> Any:
    result = _value(args[0], value)
    for check in args[1:]:
        result = check(result) if callable(check) else result
    return result


def _union(kinds: tuple[Any, ...], value: Any) -> Any:
    """Read `X | None`, or one of several dataclasses by its key `kind`."""
    if value is None and NoneType in kinds:
        return None
    tagged = {_kind_of(kind): kind for kind in kinds if kind is not NoneType}
    if None in tagged:
        return _value(tagged[None], value)
    tag = value.get("kind") if isinstance(value, Mapping) else None
    if not isinstance(tag, str) or tag not in tagged:
        raise MalformedError(f"is {tag!r:.100}, not one of {', '.join(map(str, tagged))}", "kind")
    return _record(tagged[tag], value)


def _kind_of(kind: Any) -> str | None:
    """Return the tag of a dataclass that is a member of a union."""
    tag = getattr(kind, "kind", None)  # a slot, if `kind` is a field
    return tag if isinstance(tag, str) else None


def _tuple(kinds: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
    _expect(type(value) in (list, tuple), value, "a list")
    if kinds[-1] is ...:
        kinds = kinds[:1] * len(value)
    _expect(len(value) == len(kinds), value, f"a list of {len(kinds)}")
    return tuple(_at(f"[{i}]", kinds[i], item) for i, item in enumerate(value))


def _mapping(kinds: tuple[Any, ...], value: Any) -> dict[Any, Any]:
    _expect(isinstance(value, Mapping), value, "a JSON object")
    return {_at(key, kinds[0], key): _at(key, kinds[1], item) for key, item in value.items()}


def _record(kind: Any, value: Any) -> Any:
    _expect(isinstance(value, Mapping), value, "a JSON object")
    hints, needed = _fields_of(kind)
    # A misspelt key would otherwise count as a field left out.
    allowed = hints.keys() | ({"kind"} if _kind_of(kind) else set())
    if unknown := value.keys() - allowed:
        raise MalformedError("is unknown", min(unknown))
    if missing := needed - value.keys():
        raise MalformedError("is missing", min(missing))
    return kind(**{key: _at(key, hints[key], value[key]) for key in hints if key in value})


@functools.cache
def _fields_of(kind: Any) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the types of a dataclass's fields, and the names of those without a default."""
    hints = get_type_hints(kind, include_extras=True)
    of_fields = {item.name: hints[item.name] for item in fields(kind)}
    plain = (item for item in fields(kind) if item.default_factory is MISSING)
    return of_fields, frozenset(item.name for item in plain if item.default is MISSING)


_READERS: dict[Any, Reader] = {
    Annotated: _annotated,
    Any: lambda _, value: value,
    Literal: _literal,
    Mapping: _mapping,
    NoneType: _plain(NoneType, "null"),
    Path: lambda _, value: Path(_value(str, value)),
    Union: _union,
    UnionType: _union,
    bool: _plain(bool, "true or false"),
    datetime: _time,
    float: _finite,
    int: _whole,
    str: _text,
    tuple: _tuple,
}
