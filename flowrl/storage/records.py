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

Types are exact (`1` is not a bool, `"1"` not a number, but `1` is a float), unknown keys and
missing ones are refused. Field types: bool, int, float, str, None, Path, datetime, Literal, Enum,
`tuple[X, ...]`, `tuple[X, Y]`, `Mapping[str, X]`, Any, dataclasses, `X | None`, and unions of
dataclasses with a `kind: ClassVar[str]`, which is written as the key `kind`. What several fields
must satisfy together is raised by `__post_init__` as ValueError. One error, FileRefusedError, names
the file, the key, what was found, and the remedy.
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
from flowrl.storage.atomic import write_atomic
from flowrl.storage.files import READ_LIMIT_BYTES, read_json

SEAL = "sha256"
RESTORE = "restore it from a copy (flowrl fsck says what else is damaged)"
_MOST = 2**63 - 1
_LARGEST = 1e12  # seconds, steps: clocks and dates cannot show more
Record = TypeVar("Record")
Reader = Callable[[Any], Any]  # makes the value of a field of a JSON value
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
) -> Record:
    """Read a record of this dataclass.

    Args:
      path: the file.
      kind: a dataclass, see the module's docstring.
      sealed: False if other programs write such files and may leave the seal out.
      limit_bytes: larger files are refused.
      remedy: what a user should do if the file is refused.

    Raises:
      FormatVersionError: its `format` is not 1.
      FileRefusedError: it cannot be read, its seal is wrong, or a value is not what it should be.
    """
    document = read_document(path, sealed=sealed, limit_bytes=limit_bytes, remedy=remedy)
    try:
        return from_json(kind, document)
    except MalformedError as error:
        raise FileRefusedError(f"{path} is malformed: {error}; {remedy}") from error


def read_document(
    path: Path, *, sealed: bool = True, limit_bytes: int = READ_LIMIT_BYTES, remedy: str = RESTORE
) -> dict[str, Any]:
    """Read a record as plain JSON values, without `format` and seal; raises as `read` does."""
    document = read_json(path, limit_bytes=limit_bytes)
    found = document.pop("format", None)
    if type(found) is not int or found != 1:
        raise FormatVersionError(
            f"{path} has format {found!r}, this flowrl reads 1; "
            "use the version of flowrl that wrote it"
        )
    seal = document.pop(SEAL, None)
    if seal is None and not sealed:
        return document
    if seal != seal_of({"format": found, **document}):
        problem = "has no seal" if seal is None else "is not what its seal says"
        raise FileRefusedError(f"{path} is damaged or was edited: it {problem}; {remedy}")
    return document


def sealed(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON object with its seal as the last key."""
    content = {key: value for key, value in document.items() if key != SEAL}
    return {**content, SEAL: seal_of(content)}


def seal_of(document: Mapping[str, Any]) -> str:
    """Return the sha256 of a JSON object's content, whatever its spaces and the order of its keys.

    >>> seal_of({"a": 1, "b": [2.5]}) == seal_of({"b": [2.5], "a": 1, "sha256": "…"})
    True
    """
    content = {key: value for key, value in document.items() if key != SEAL}
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
    """Return the value of type `kind` that `to_json` made this JSON value of.

    Raises:
      MalformedError: names the key, what was found there and what should be.
    """
    return _at("", _reader(kind), value)


class MalformedError(ValueError):
    """A value is not of the type, or not within the limits, of its field."""

    def __init__(self, problem: str, key: str = "") -> None:
        super().__init__(f"{key} {problem}".strip())
        self.problem, self.key = problem, key


def at_least(low: float) -> Check:
    """Return a check for the type of a field: a number from `low`."""
    return _check(lambda value: value >= low, f"must be at least {low:g}")


def above(low: float) -> Check:
    """Return a check for the type of a field: a number above `low`."""
    return _check(lambda value: value > low, f"must be above {low:g}")


def within(low: float, high: float) -> Check:
    """Return a check for the type of a field: a number from `low` to `high`."""
    return _check(lambda value: low <= value <= high, f"must lie in [{low:g}, {high:g}]")


def matching(pattern: str, meaning: str) -> Check:
    """Return a check for the type of a field: text that the whole pattern matches."""
    found = re.compile(pattern).fullmatch
    return _check(lambda value: found(value) is not None, f"must be {meaning}")


def _check(holds: Callable[[Any], bool], problem: str) -> Check:
    def check(value: Any) -> Any:
        if not holds(value):
            raise ValueError(problem)
        return value

    return check


Natural = Annotated[int, at_least(0)]
Positive = Annotated[int, at_least(1)]
Share = Annotated[float, within(0.0, 1.0)]
# A word can be part of a path; a phase can be shown on a terminal.
Word = Annotated[str, matching(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", "a plain word")]
Phase = Annotated[str, matching(r"[a-z]{1,20}", "a word of lower-case letters")]


def _lines(value: Any) -> str:
    """Return JSON text, a list with one line for each item."""
    if not isinstance(value, list) or not value:
        return json.dumps(value, allow_nan=False)
    items = ",\n".join(json.dumps(item, allow_nan=False) for item in value)
    return f"[\n{items}\n]"


def _not(value: Any, expected: str) -> MalformedError:
    return MalformedError(f"is {repr(value)[:100]}, not {expected}")


def _at(key: str, read_value: Reader, value: Any) -> Any:
    """Read a value; an error names the key below which it was found."""
    try:
        return read_value(value)
    except MalformedError as error:
        dot = "." if key and error.key and not error.key.startswith("[") else ""
        raise MalformedError(error.problem, f"{key}{dot}{error.key}") from error
    except (ValueError, TypeError, FlowrlError) as error:  # of a check, or of __post_init__
        raise MalformedError(f"is {repr(value)[:100]}: {error}", key) from error


@functools.cache
def _reader(kind: Any) -> Reader:
    """Return the function that makes a value of type `kind` of a JSON value."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _checked(_reader(args[0]), [check for check in args[1:] if callable(check)])
    if origin in (Union, UnionType):
        return _union(args)
    if origin is Literal:
        return lambda value: value if value in args else _refuse(value, args)
    if origin is tuple:
        return _tuple(args)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping(_reader(args[0]), _reader(args[1]))
    if is_dataclass(kind):
        return _record(kind, tag="kind" if _kind_of(kind) else None)
    if isinstance(kind, type) and issubclass(kind, Enum):
        members = {member.value: member for member in kind}
        return lambda value: members[value] if _text(value) in members else _refuse(value, members)
    return _PLAIN[kind]


def _text(value: Any) -> str:
    if type(value) is not str:
        raise _not(value, "text")
    return value


def _whole(value: Any) -> int:
    if type(value) is not int or abs(value) > _MOST:
        raise _not(value, "a whole number of 64 bits")
    return value


def _finite(value: Any) -> float:
    if type(value) not in (int, float) or not abs(value) <= _LARGEST:
        raise _not(value, "a finite number up to 1e12")
    return float(value)


def _boolean(value: Any) -> bool:
    if type(value) is not bool:
        raise _not(value, "true or false")
    return value


def _nothing(value: Any) -> None:
    if value is not None:
        raise _not(value, "null")


def _time(value: Any) -> datetime:
    found = datetime.fromisoformat(_text(value))
    if found.tzinfo is None:
        raise _not(value, "a time with its time zone")
    return found.astimezone(UTC)


def _refuse(value: Any, allowed: Any) -> Any:
    raise _not(value, "one of " + ", ".join(map(str, allowed)))


_PLAIN: dict[Any, Reader] = {
    Any: lambda value: value,
    bool: _boolean,
    int: _whole,
    float: _finite,
    str: _text,
    Path: lambda value: Path(_text(value)),
    datetime: _time,
    NoneType: _nothing,
}


def _checked(read_value: Reader, checks: list[Reader]) -> Reader:
    def read_checked(value: Any) -> Any:
        found = read_value(value)
        for check in checks:
            found = check(found)
        return found

    return read_checked


def _union(kinds: tuple[Any, ...]) -> Reader:
    """Read `X | None`, or one of several dataclasses by its key `kind`."""
    others = [kind for kind in kinds if kind is not NoneType]
    tagged = {tag: _reader(kind) for kind in others if (tag := _kind_of(kind))}
    only = None if tagged else _reader(others[0])
    assert tagged or len(others) == 1, f"cannot tell {others} apart"

    def read_one(value: Any) -> Any:
        if value is None and NoneType in kinds:
            return None
        if only is not None:
            return only(value)
        found = value.get("kind") if isinstance(value, dict) else None
        if not isinstance(found, str) or found not in tagged:
            raise MalformedError(f"is {found!r:.100}, not one of {', '.join(tagged)}", "kind")
        return tagged[found](value)

    return read_one


def _kind_of(kind: Any) -> str | None:
    """Return the tag of a dataclass that is a member of a union."""
    has_field = is_dataclass(kind) and any(item.name == "kind" for item in fields(kind))
    return None if has_field else getattr(kind, "kind", None)


def _tuple(kinds: tuple[Any, ...]) -> Reader:
    readers = [_reader(kind) for kind in kinds if kind is not ...]
    endless = kinds[-1] is ...

    def read_tuple(value: Any) -> tuple[Any, ...]:
        if type(value) not in (list, tuple) or not (endless or len(value) == len(readers)):
            raise _not(value, "a list" if endless else f"a list of {len(readers)}")
        each = readers * len(value) if endless else readers
        return tuple(_at(f"[{i}]", each[i], item) for i, item in enumerate(value))

    return read_tuple


def _mapping(read_key: Reader, read_value: Reader) -> Reader:
    def read_mapping(value: Any) -> dict[Any, Any]:
        if not isinstance(value, Mapping):
            raise _not(value, "a JSON object")
        return {_at(k, read_key, k): _at(k, read_value, item) for k, item in value.items()}

    return read_mapping


def _record(kind: Any, tag: str | None) -> Reader:
    hints = get_type_hints(kind, include_extras=True)
    readers = {item.name: _reader(hints[item.name]) for item in fields(kind)}
    needed = {
        item.name
        for item in fields(kind)
        if item.default is MISSING and item.default_factory is MISSING
    }

    def read_record(value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise _not(value, "a JSON object")
        # A misspelt key would otherwise count as a field left out.
        if unknown := value.keys() - readers.keys() - {tag}:
            raise MalformedError("is unknown", min(unknown))
        if missing := needed - value.keys():
            raise MalformedError("is missing", min(missing))
        return kind(**{k: _at(k, readers[k], item) for k, item in value.items() if k in readers})

    return read_record
