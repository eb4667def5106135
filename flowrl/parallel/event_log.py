"""Changes of status in words: one line for people, one JSON line for events.jsonl."""

from __future__ import annotations

import json
import logging
from datetime import datetime
from pathlib import Path

from flowrl import storage
from flowrl.launchers.base import Handle
from flowrl.parallel.events import NOT_ASKED_FOR, PAUSED, StatusChange
from flowrl.parallel.outcomes import CANCELLED
from flowrl.parallel.status import (
    Blocked,
    Completed,
    Entry,
    Failed,
    Held,
    Merging,
    Running,
    Status,
    Waiting,
    percent,
    ranges,
)

logger = logging.getLogger(__name__)
_FIELDS = (
    *("attempt", "run_id", "devices", "why", "blocked_by"),
    *("frames", "success_rate", "wall_seconds"),
)
_GOES_ON = {PAUSED: "`flowrl resume`", NOT_ASKED_FOR: "a start asks for it"}  # by why it is held


def log_change(events: Path, change: StatusChange, now: datetime) -> None:
    """Write a change of status to the log and to events.jsonl; no decision depends on either."""
    entry, text = change.entry, sentence(change.before, change.entry, now)
    if not text:
        return
    data = {
        "at": now.isoformat().replace("+00:00", "Z"),
        "skill": entry.skill,
        "before": _kind(change.before),
        "status": entry.status.kind,
        "expert": entry.expert,
        **{name: getattr(entry.status, name) for name in _FIELDS if hasattr(entry.status, name)},
        "text": text,
    }
    level = logging.WARNING if isinstance(entry.status, Failed) else logging.INFO
    logger.log(level, "%s %s", entry.skill, text, extra={"change": data})
    try:
        storage.append_line(events, json.dumps(data, ensure_ascii=False))
    except OSError as error:
        logger.warning("events.jsonl is not written: %s", error.strerror)


def sentence(before: Status | None, entry: Entry, now: datetime) -> str:
    """Return what happened to a skill, to be read after its name; "" for minor changes."""
    match entry.status:
        case Waiting() as status:
            return _waiting(before, entry, status, now)
        case Blocked(blocked_by=by, why=why):
            return "; ".join(filter(None, [f"is blocked by {', '.join(by)}", why]))
        case Running(handle=Handle()) as status:
            return _running(before, entry, status)
        case Merging(why=why, not_before=datetime() as due):
            return f"is merged {_in(due, now)}: {why}"
        case Completed(success_rate=rate, frames=frames, wall_seconds=seconds, why=why):
            done = f"{percent(rate)} success in training after {frames:,} frames in {seconds:.0f} s"
            return f"is done: expert {entry.expert}, {why or done}"
        case Failed(why=why, attempt=attempt):
            cancelled = f"is {why}; `flowrl retry` trains it anew"
            return cancelled if why == CANCELLED else f"has failed, attempt {attempt}: {why}"
        case Held(why=why):
            return f"is held until {_GOES_ON.get(why, '`flowrl retry`')}: {why}"
        case _:
            return ""


def _kind(status: Status | None) -> str | None:
    """Return the word of the status before; a run that is only about to be launched is no news."""
    launching = isinstance(status, Running) and status.handle is None
    return "preparing" if launching else status and status.kind


def _waiting(before: Status | None, entry: Entry, status: Waiting, now: datetime) -> str:
    if before is None:
        return f"is added, needs {', '.join(entry.needs)}" if entry.needs else "is added"
    if isinstance(before, Blocked):
        return "is no longer blocked"
    if isinstance(before, Completed):
        rate = percent(before.success_rate)
        return f"is trained on from {rate} success, attempt {status.attempt}"
    how = "goes on" if status.run_id else "tries again"
    if isinstance(before, Failed | Held):
        return f"{how}, attempt {status.attempt}"
    return f"{how} {_in(status.not_before, now)}, attempt {status.attempt}: {status.why}"


def _running(before: Status | None, entry: Entry, status: Running) -> str:
    if isinstance(before, Running) and before.handle is not None:
        asked = status.stop_reason and status.stop_reason is not before.stop_reason
        return f"is asked to end ({status.stop_reason.value})" if asked else ""
    session = status.handle.session if status.handle else ""
    where = f"{session}, gpu {ranges(status.devices)}" if status.devices else session
    return f"is training as expert {entry.expert}, attempt {status.attempt}, session {where}"


def _in(due: datetime | None, now: datetime) -> str:
    if due is None:
        return "as soon as it can"
    return f"in {max(0.0, (due - now).total_seconds()):.0f} s"
