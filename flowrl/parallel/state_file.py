"""scheduler_state.json: one line per skill, valid JSON, for the scheduler, for people and for jq.

Every line has `skill`, `status`, `expert`, `attempt`, `needs` and `waits_for`, and the other
fields of its status: `session`, `device`, `blocked_by`, `frames`, `success_rate`, `why` and more.
Fields with their default value are left out, which jq reads as null. Times are ISO 8601 in UTC.
`requests` holds the responses to the last requests, `stop_mode` whether a user stops the daemon.

The first line holds the CRC32 of all that follows, so a flipped bit is never read as a state.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flowrl import storage
from flowrl.errors import FileRefusedError, FormatVersionError, GraphError, NameRefusedError
from flowrl.launchers.base import Handle
from flowrl.parallel.events import NewSkill, Response, StopMode
from flowrl.parallel.state import SchedulerState, check_new_skills
from flowrl.parallel.status import (
    Blocked,
    Completed,
    Entry,
    Failed,
    Held,
    Merging,
    Preparing,
    Running,
    Status,
    StopReason,
    Waiting,
)
from flowrl.paths import session_name

FORMAT = 1
_HEAD = re.compile(rb'\{"format": [0-9]+, "crc32": "([0-9a-f]{8})",\n')
_BETWEEN = b",\n"
_KINDS: dict[str, type] = {
    kind.word: kind
    for kind in (Waiting, Blocked, Preparing, Running, Merging, Completed, Failed, Held)
}
_NAMES = {"by": "blocked_by"}  # field → key
_COUNTS = ("failures", "frames_used", "refusals", "requeues")
_DUMP = json.JSONEncoder(allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode


class StateFile:
    """scheduler_state.json of one graph; keeps the lines it wrote, so that saving is quick."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines: dict[str, tuple[Entry, tuple[str, ...], bytes]] = {}

    def load(self) -> SchedulerState | None:
        """Return the saved state, or None when there is no file.

        Raises:
          FileRefusedError: the file cannot be read or trusted; it is left as it is.
        """
        if not self.path.exists() and not self.path.is_symlink():
            return None
        return decode(storage.read_bytes(self.path), str(self.path))

    def save(self, state: SchedulerState) -> None:
        """Replace the file atomically."""
        storage.write_atomic(self.path, self.encode(state))

    def encode(self, state: SchedulerState) -> bytes:
        """Return the file's content; the line of an unchanged entry is used again."""
        first = {"next_expert": state.next_expert, "stop_mode": state.stop_mode.value}
        start = json.dumps(first)[1:-1].encode()
        responses = _BETWEEN.join(_DUMP(_plain(one)).encode() for one in state.responses)
        lines = _BETWEEN.join(self._line(state, entry) for entry in state.entries.values())
        rest = b'%s, "requests": [\n%s\n], "skills": [\n%s\n]}\n' % (start, responses, lines)
        return b'{"format": %d, "crc32": "%08x",\n%s' % (FORMAT, zlib.crc32(rest), rest)

    def _line(self, state: SchedulerState, entry: Entry) -> bytes:
        waits_for = state.waits_for(entry.skill)
        known = self._lines.get(entry.skill)
        if known is not None and known[0] is entry and known[1] == waits_for:
            return known[2]
        line = _DUMP(_entry_fields(entry, waits_for)).encode()
        self._lines[entry.skill] = (entry, waits_for, line)
        return line


def decode(content: bytes, path: str) -> SchedulerState:
    """Return the state in the content of scheduler_state.json, which was found at `path`.

    Raises:
      FormatVersionError: another version of flowrl wrote it.
      FileRefusedError: it is damaged.
    """
    document = read_document(content, path)
    try:
        entries = [_entry_of(data, order) for order, data in enumerate(document["skills"])]
        next_expert = _natural(document["next_expert"])
        stop_mode = StopMode(document["stop_mode"])
        responses = tuple(map(response_of, document["requests"]))
        _check(entries, next_expert)
    except (KeyError, TypeError, ValueError, GraphError, NameRefusedError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from error
    return SchedulerState.of(
        entries, next_expert=next_expert, stop_mode=stop_mode, responses=responses
    )


def read_document(content: bytes, path: str) -> dict[str, Any]:
    """Return the JSON object in scheduler_state.json, once its checksum holds.

    Raises:
      FormatVersionError, FileRefusedError: as `decode`.
    """
    head = _HEAD.match(content)
    if head is not None and int(head[1], 16) != zlib.crc32(content[head.end() :]):
        raise _damaged(path, "its checksum does not hold")
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from error
    found = document.get("format") if isinstance(document, dict) else None
    if found != FORMAT:
        raise FormatVersionError(
            f"{path} has format {found!r}, this flowrl reads {FORMAT}; go on with the version of "
            f"flowrl that wrote it, or move the file away and run {_recovery(path)}"
        )
    if head is None:
        raise _damaged(path, "its first line is not as it was written")
    return document


def response_of(data: Mapping[str, Any]) -> Response:
    """Return the response to a request that a line holds.

    Raises:
      KeyError, TypeError, ValueError: it holds none.
    """
    return Response(
        id=_text(data["id"]),
        verb=_text(data["verb"]),
        skill=_or_none(_text)(data["skill"]),
        at=_time(data["at"]),
        outcome=_text(data["outcome"]),
    )


def _check(entries: list[Entry], next_expert: int) -> None:
    """Names, needs and expert numbers fit together."""
    check_new_skills([NewSkill(skill=e.skill, needs=e.needs, expert=e.expert) for e in entries], {})
    for entry in entries:
        if entry.expert is not None and entry.expert >= next_expert:
            raise ValueError(f"expert {entry.expert} is not below next_expert {next_expert}")
        if entry.expert is None and isinstance(entry.status, Preparing | Running | Merging):
            raise ValueError(f"{entry.skill!r} is {entry.status.word} without an expert number")


def _damaged(path: str, why: str) -> FileRefusedError:
    return FileRefusedError(
        f"{path} is damaged ({why}); restore it from a copy, or run {_recovery(path)}: what has "
        "been trained is in checkpoints/ and is found again"
    )


def _recovery(path: str) -> str:
    return f"`flowrl recover {Path(path).parent}`"


def _entry_fields(entry: Entry, waits_for: tuple[str, ...]) -> dict[str, Any]:
    """The entry as JSON fields; but for the first six, those with default values are left out."""
    status = entry.status
    data: dict[str, Any] = {
        "skill": entry.skill,
        "status": status.word,
        "expert": entry.expert,
        "attempt": None,
        "needs": entry.needs,
        "waits_for": waits_for,
    }
    if isinstance(status, Running) and entry.expert is not None:
        session = status.handle.session if status.handle else None
        data["session"] = session or session_name(entry.expert, entry.skill)
    for item in fields(status):
        key, value = _NAMES.get(item.name, item.name), getattr(status, item.name)
        if key in data or value != item.default:
            data[key] = _plain(value)
    counts = {name: getattr(entry, name) for name in ("priority", *_COUNTS, "error")}
    return data | {name: value for name, value in counts.items() if value}


def _plain(value: Any) -> Any:
    match value:
        case datetime():
            return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
        case Handle():
            return asdict(value)
        case Response():
            return {**asdict(value), "at": _plain(value.at)}
        case _:
            return value


def _entry_of(data: Mapping[str, Any], order: int) -> Entry:
    return Entry(
        skill=_text(data["skill"]),
        needs=_texts(data["needs"]),
        order=order,
        status=_status(data),
        expert=_or_none(_natural)(data["expert"]),
        priority=_whole(data.get("priority", 0)),
        error=_text(data.get("error", "")),
        **{name: _natural(data.get(name, 0)) for name in _COUNTS},
    )


def _status(data: Mapping[str, Any]) -> Status:
    kind = _KINDS[data["status"]]
    keys = {item.name: _NAMES.get(item.name, item.name) for item in fields(kind)}
    return kind(**{name: _READ[name](data[key]) for name, key in keys.items() if key in data})


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


def _natural(value: Any) -> int:
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
        pid=_natural(value["pid"]),
        start_time=_text(value["start_time"]),
        pane=_or_none(_text)(value["pane"]),
        server_pid=_or_none(_natural)(value["server_pid"]),
    )


def _or_none(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else read(value)


_READ: dict[str, Callable[[Any], Any]] = {
    "alone": _flag,
    "stop_reason": StopReason,
    "at": _time,
    "attempt": _natural,
    "by": _texts,
    "device": _or_none(_text),
    "frames": _natural,
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
