"""One skill as one line of scheduler_state.json, and back."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from datetime import UTC, datetime
from typing import Any

from flowrl.launchers.job import Handle
from flowrl.parallel.asks import Answer
from flowrl.parallel.status import (
    Asked,
    Blocked,
    Completed,
    Entry,
    Failed,
    Held,
    Merging,
    Preparing,
    Running,
    Status,
    Waiting,
)
from flowrl.paths import session_name

_KINDS: dict[str, type] = {
    kind.word: kind
    for kind in (Waiting, Blocked, Preparing, Running, Merging, Completed, Failed, Held)
}
_NAMES = {"by": "blocked_by"}  # field → key
_COUNTS = ("failures", "frames_used", "refusals", "requeues")
_DUMP = json.JSONEncoder(allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode


def line(entry: Entry, waits_for: tuple[str, ...]) -> bytes:
    """The entry as JSON; but for the first six, keys that would say nothing are left out."""
    status = entry.status
    facts: dict[str, Any] = {
        "skill": entry.skill,
        "status": status.word,
        "expert": entry.expert,
        "attempt": None,
        "needs": entry.needs,
        "waits_for": waits_for,
    }
    if isinstance(status, Running) and entry.expert is not None:
        session = status.handle.session if status.handle else None
        facts["session"] = session or session_name(entry.expert, entry.skill)
    for item in fields(status):
        key, value = _NAMES.get(item.name, item.name), getattr(status, item.name)
        if key in facts or value != item.default:
            facts[key] = _plain(value)
    counts = {name: getattr(entry, name) for name in ("priority", *_COUNTS, "error")}
    facts |= {name: value for name, value in counts.items() if value}
    return _DUMP(facts).encode()


def answer_line(answer: Answer) -> bytes:
    """The answer to a request as JSON."""
    return _DUMP({**asdict(answer), "at": _plain(answer.at)}).encode()


def answer_of(facts: Mapping[str, Any]) -> Answer:
    """The answer that a line holds.

    Raises:
      KeyError, TypeError, ValueError: it holds none.
    """
    return Answer(
        id=_text(facts["id"]),
        verb=_text(facts["verb"]),
        skill=_or_none(_text)(facts["skill"]),
        at=_time(facts["at"]),
        outcome=_text(facts["outcome"]),
    )


def _plain(value: Any) -> Any:
    match value:
        case datetime():
            return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
        case Handle():
            return asdict(value)
        case _:
            return value


def entry_of(facts: Mapping[str, Any], order: int) -> Entry:
    """The entry that a line holds.

    Raises:
      KeyError, TypeError, ValueError: it holds none.
    """
    return Entry(
        skill=_text(facts["skill"]),
        needs=_texts(facts["needs"]),
        order=order,
        status=_status(facts),
        expert=None if facts["expert"] is None else natural(facts["expert"]),
        priority=_whole(facts.get("priority", 0)),
        error=_text(facts.get("error", "")),
        **{name: natural(facts.get(name, 0)) for name in _COUNTS},
    )


def _status(facts: Mapping[str, Any]) -> Status:
    kind = _KINDS[facts["status"]]
    keys = {item.name: _NAMES.get(item.name, item.name) for item in fields(kind)}
    return kind(**{name: _READ[name](facts[key]) for name, key in keys.items() if key in facts})


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not text")
    return value


def _texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r} is not a list")
    return tuple(map(_text, value))


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{value!r} is not a whole number")
    return value


def natural(value: Any) -> int:
    """A whole number that is not negative.

    Raises:
      TypeError, ValueError: it is none.
    """
    if _whole(value) < 0:
        raise ValueError(f"{value!r} is negative")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{value!r} is neither true nor false")
    return value


def _number(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{value!r} is not a number")
    return float(value)


def _time(value: Any) -> datetime:
    time = datetime.fromisoformat(_text(value))
    if time.tzinfo is None:
        raise ValueError(f"{value!r} does not say its time zone")
    return time.astimezone(UTC)


def _handle(value: Any) -> Handle:
    return Handle(
        run_id=_text(value["run_id"]),
        session=_text(value["session"]),
        pid=natural(value["pid"]),
        birth=_text(value["birth"]),
        pane=_or_none(_text)(value["pane"]),
        server_pid=_or_none(natural)(value["server_pid"]),
    )


def _or_none(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else read(value)


_READ: dict[str, Callable[[Any], Any]] = {
    "alone": _flag,
    "asked": Asked,
    "at": _time,
    "attempt": natural,
    "by": _texts,
    "device": _or_none(_text),
    "frames": natural,
    "handle": _or_none(_handle),
    "log": _texts,
    "not_before": _or_none(_time),
    "resumed": _flag,
    "run_id": _or_none(_text),
    "since": _time,
    "success_rate": _number,
    "wall_seconds": _number,
    "why": _text,
}
