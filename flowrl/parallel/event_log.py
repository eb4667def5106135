"""Changes of status in words: one line for people, one JSON line for events.jsonl."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, assert_never

from flowrl import storage
from flowrl.parallel.events import PAUSED, StatusChange
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
    Waiting,
)

logger = logging.getLogger(__name__)
_FIELDS = (
    *("attempt", "run_id", "device", "why", "blocked_by"),
    *("frames", "success_rate", "wall_seconds"),
)
_MOST_LOGGED = 30  # of changes that come at once; all are in events.jsonl


class EventLog:
    """Writes changes of status to the log and to events.jsonl; no decision depends on either."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def append(self, changes: Sequence[StatusChange], now: datetime) -> None:
        """Log the changes that came in a row."""
        described = [(c.before, c.entry, sentence(c.before, c.entry, now)) for c in changes]
        described = [item for item in described if item[-1]]
        lines = [_line(before, entry, text, now) for before, entry, text in described]
        for (_, entry, text), data in zip(described[:_MOST_LOGGED], lines, strict=False):
            level = logging.WARNING if isinstance(entry.status, Failed) else logging.INFO
            logger.log(level, "%s %s", entry.skill, text, extra={"change": data})
        if len(described) > _MOST_LOGGED:
            logger.info("and %d more changes at once", len(described) - _MOST_LOGGED)
        if not lines:
            return
        try:
            text = "\n".join(json.dumps(data, ensure_ascii=False) for data in lines)
            storage.append_line(self._path, text)
        except OSError as error:
            logger.warning("events.jsonl is not written: %s", error.strerror)


def sentence(before: Status | None, entry: Entry, now: datetime) -> str:
    """Return what happened to a skill, to be read after its name; "" for minor changes."""
    match entry.status:
        case Waiting() as status:
            return _waiting(before, entry, status, now)
        case Blocked(blocked_by=by):
            return f"is blocked by {', '.join(by)}"
        case Running() as status:
            return _running(before, entry, status) if status.handle else ""
        case Merging(why=why, not_before=due):
            return f"is merged {_in(due, now)}: {why}" if due else ""
        case Preparing():
            return ""
        case Completed() | Failed() | Held() as status:
            return _ended(entry, status)
        case _:
            assert_never(entry.status)


def _ended(entry: Entry, status: Completed | Failed | Held) -> str:
    match status:
        case Completed(success_rate=rate, frames=frames, wall_seconds=seconds):
            return (
                f"is done: expert {entry.expert}, {rate:.0%} success after {frames:,} frames in "
                f"{seconds:.0f} s"
            )
        case Failed(why=why, attempt=attempt):
            return f"has failed, attempt {attempt}: {why}"
        case Held(why=why):
            return f"is held until `flowrl {'resume' if why == PAUSED else 'retry'}`: {why}"


def _waiting(before: Status | None, entry: Entry, status: Waiting, now: datetime) -> str:
    if before is None:
        return f"is added, needs {', '.join(entry.needs)}" if entry.needs else "is added"
    if isinstance(before, Blocked):
        return "is no longer blocked"
    if isinstance(before, Failed | Held):
        how = "goes on" if status.run_id else "is retried"
        return f"{how}, attempt {status.attempt}"
    how = "goes on" if status.run_id else "tries again"
    return f"{how} {_in(status.not_before, now)}, attempt {status.attempt}: {status.why}"


def _running(before: Status | None, entry: Entry, status: Running) -> str:
    if isinstance(before, Running) and before.handle is not None:
        return f"is asked to end ({status.stop_reason.value})" if status.stop_reason else ""
    session = status.handle.session if status.handle else ""
    where = "" if status.device is None else f", device {status.device}"
    how = "goes on" if status.resumed else "is training"
    return f"{how} as expert {entry.expert}, attempt {status.attempt}{where}, session {session}"


def _line(before: Status | None, entry: Entry, text: str, now: datetime) -> dict[str, Any]:
    return {
        "at": now.isoformat().replace("+00:00", "Z"),
        "skill": entry.skill,
        "before": None if before is None else before.kind,
        "status": entry.status.kind,
        "expert": entry.expert,
        **_fields(entry.status),
        "text": text,
    }


def _fields(status: Status) -> dict[str, Any]:
    return {name: getattr(status, name) for name in _FIELDS if hasattr(status, name)}


def _in(due: datetime | None, now: datetime) -> str:
    if due is None:
        return "as soon as it can"
    return f"in {max(0.0, (due - now).total_seconds()):.0f} s"
