"""scheduler_state.json: one line per skill, valid JSON, for the scheduler, for people and for jq.

Every line has `skill`, `status`, `expert`, `attempt`, `session`, `device`, `needs`, `waits_for`,
`blocked_by`, `frames`, `success_rate` and `why`, null or empty where they say nothing, and what
else is true of its status. Times are ISO 8601 in UTC.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flowrl import durable
from flowrl.errors import FileRefusedError, FormatVersionError, GraphError, NameRefusedError
from flowrl.launch.job import Handle
from flowrl.layout import session_name
from flowrl.parallel.adding import checked
from flowrl.parallel.board import SchedulerState
from flowrl.parallel.signals import NewSkill
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

FORMAT = 1
_KINDS: dict[str, type] = {
    kind.word: kind
    for kind in (Waiting, Blocked, Preparing, Running, Merging, Completed, Failed, Held)
}
_NAMES = {"by": "blocked_by"}  # field → key
_BOOKKEEPING = ("priority", "failures", "frames_used", "refusals", "requeues")


class StateFile:
    """scheduler_state.json of one graph; remembers each line it wrote, so that saving is quick."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: dict[str, tuple[Entry, int, str]] = {}

    def load(self) -> SchedulerState | None:
        """The saved state, or None when there is none.

        Raises:
          FileRefusedError: the file cannot be read or trusted; it is left as it is.
        """
        if not self._path.exists() and not self._path.is_symlink():
            return None
        return decode(durable.read_bytes(self._path), str(self._path))

    def save(self, state: SchedulerState) -> None:
        """Replace the file at one stroke."""
        durable.write_atomic(self._path, self.encode(state))

    def encode(self, state: SchedulerState) -> str:
        """The file's content."""
        missing = state.index.missing
        lines: list[str] = []
        for skill, entry in state.entries.items():
            known = self._lines.get(skill)
            if known is None or known[0] is not entry or known[1] != missing[skill]:
                known = (entry, missing[skill], _line(entry, state.waits_for(skill)))
                self._lines[skill] = known
            lines.append(known[2])
        head = f'{{"format": {FORMAT}, "next_expert": {state.next_expert}, "skills": [\n'
        return head + ",\n".join(lines) + "\n]}\n"


def encode(state: SchedulerState) -> str:
    """The state as the text of scheduler_state.json."""
    return StateFile(Path()).encode(state)


def decode(content: str | bytes, place: str) -> SchedulerState:
    """The state in the content of scheduler_state.json, which was found at `place`.

    Raises:
      FormatVersionError: another version of flowrl wrote it.
      FileRefusedError: it is damaged.
    """
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise _damaged(place, error) from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        found = document.get("format") if isinstance(document, dict) else None
        raise FormatVersionError(
            f"{place} has format {found!r}, this flowrl reads {FORMAT}; go on with the version of "
            "flowrl that wrote it"
        )
    try:
        entries = [_entry(facts, order) for order, facts in enumerate(document["skills"])]
        next_expert = _natural(document["next_expert"])
        _check(entries, next_expert)
    except (KeyError, TypeError, ValueError, GraphError, NameRefusedError) as error:
        raise _damaged(place, error) from error
    return SchedulerState.of(entries, next_expert=next_expert)


def _line(entry: Entry, waits_for: tuple[str, ...]) -> str:
    status = entry.status
    facts: dict[str, Any] = {
        "skill": entry.skill,
        "status": status.word,
        "expert": entry.expert,
        "attempt": None,
        "session": None,
        "device": None,
        "needs": entry.needs,
        "waits_for": waits_for,
        "blocked_by": (),
        "frames": None,
        "success_rate": None,
        "why": "",
    }
    for item in fields(status):
        facts[_NAMES.get(item.name, item.name)] = _plain(getattr(status, item.name))
    if isinstance(status, Running) and entry.expert is not None:
        session = status.handle.session if status.handle else None
        facts["session"] = session or session_name(entry.expert, entry.skill)
    facts |= {name: getattr(entry, name) for name in _BOOKKEEPING}
    return json.dumps(facts, allow_nan=False, ensure_ascii=False)


def _plain(value: Any) -> Any:
    match value:
        case datetime():
            return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
        case Handle():
            return asdict(value)
        case _:
            return value


def _entry(facts: Mapping[str, Any], order: int) -> Entry:
    return Entry(
        skill=_text(facts["skill"]),
        needs=_texts(facts["needs"]),
        order=order,
        status=_status(facts),
        expert=None if facts["expert"] is None else _natural(facts["expert"]),
        priority=_whole(facts["priority"]),
        **{name: _natural(facts[name]) for name in _BOOKKEEPING if name != "priority"},
    )


def _status(facts: Mapping[str, Any]) -> Status:
    kind = _KINDS[facts["status"]]
    return kind(
        **{item.name: _READ[item.name](facts[_NAMES.get(item.name, item.name)])
           for item in fields(kind)}
    )  # fmt: skip


def _check(entries: list[Entry], next_expert: int) -> None:
    """Names, needs and expert numbers fit together."""
    items = [NewSkill(skill=e.skill, needs=e.needs, expert=e.expert) for e in entries]
    checked(items, {}, {})
    for entry in entries:
        if entry.expert is not None and entry.expert >= next_expert:
            raise ValueError(f"expert {entry.expert} is not below next_expert {next_expert}")
        if entry.expert is None and isinstance(entry.status, Preparing | Running | Merging):
            raise ValueError(f"{entry.skill!r} is {entry.status.word} without an expert number")


def _damaged(place: str, error: Exception) -> FileRefusedError:
    return FileRefusedError(
        f"{place} is damaged ({type(error).__name__}: {error}); restore it from a copy, or move "
        "it away: what has been trained is in checkpoints/ and is found again"
    )


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
        birth=_text(value["birth"]),
        pane=_or_none(_text)(value["pane"]),
        server_pid=_or_none(_natural)(value["server_pid"]),
    )


def _or_none(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else read(value)


_READ: dict[str, Callable[[Any], Any]] = {
    "alone": _flag,
    "asked": Asked,
    "at": _time,
    "attempt": _natural,
    "by": _texts,
    "device": _or_none(_text),
    "frames": _natural,
    "handle": _or_none(_handle),
    "not_before": _or_none(_time),
    "resumed": _flag,
    "run_id": _or_none(_text),
    "since": _time,
    "success_rate": _number,
    "wall_seconds": _number,
    "why": _text,
}
