"""scheduler_state.json: one line per skill, valid JSON, for the scheduler, for people and for jq.

Every line has `skill`, `status`, `expert`, `attempt`, `needs` and `waits_for`, and the other
fields of its status: `session`, `devices`, `blocked_by`, `frames`, `success_rate`, `why` and more.
Fields with their default value are left out, which jq reads as null. Times are ISO 8601 in UTC.
`requests` holds the responses to the last requests, `stop_mode` whether a user stops the daemon.

The first line holds the CRC32 of all that follows, so a flipped bit is never read as a state.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from flowrl import storage
from flowrl.errors import (
    FileRefusedError,
    FormatVersionError,
    GraphError,
    NameRefusedError,
)
from flowrl.parallel.events import NewSkill
from flowrl.parallel.state import SchedulerState, check_new_skills
from flowrl.parallel.status import Entry, Running
from flowrl.paths import session_name
from flowrl.redaction import cleaned
from flowrl.storage import records

FORMAT = 1
_HEAD = re.compile(rb'\{"format": [0-9]+, "crc32": "([0-9a-f]{8})",\n')
_BETWEEN = b",\n"
_ENTRY = frozenset(item.name for item in fields(Entry)) - {"status"}
_DERIVED = frozenset({"status", "waits_for", "session"})  # keys for people, and the status's kind
_DUMP = json.JSONEncoder(allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode


class StateFile:
    """scheduler_state.json of one graph; keeps the lines it wrote, so that saving is quick."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines: dict[str, tuple[Entry, tuple[str, ...], bytes]] = {}

    def load(self) -> SchedulerState | None:
        """Return the saved state, or None when there is no file.

        Raises:
          FormatVersionError: another version of flowrl wrote it.
          FileRefusedError: the file cannot be read or trusted; it is left as it is.
        """
        if not self.path.exists() and not self.path.is_symlink():
            return None
        return decode(storage.read_bytes(self.path), str(self.path))

    def load_document(self) -> dict[str, Any]:
        """Return the saved state as JSON values, with `skills`, `requests` and `stop_mode`.

        Raises:
          FormatVersionError, FileRefusedError: as `load`.
        """
        state = decode(storage.read_bytes(self.path), str(self.path))
        shown = {
            skill: replace(entry, status=cleaned(entry.status, ()))  # no terminal escapes
            for skill, entry in state.entries.items()
        }
        return json.loads(self.encode(replace(state, entries=shown)))

    def save(self, state: SchedulerState) -> None:
        """Replace the file atomically."""
        storage.write_atomic(self.path, self.encode(state))

    def encode(self, state: SchedulerState) -> bytes:
        """Return the file's content; the line of an unchanged entry is used again."""
        first = _DUMP({"next_expert": state.next_expert, "stop_mode": state.stop_mode})[1:-1]
        responses = _BETWEEN.join(_DUMP(records.to_json(one)).encode() for one in state.responses)
        lines = _BETWEEN.join(self._line(state, entry) for entry in state.entries.values())
        parts = (first.encode(), responses, lines)
        rest = b'%s,"requests": [\n%s\n],"skills": [\n%s\n]}\n' % parts
        return b'{"format": %d, "crc32": "%08x",\n%s' % (FORMAT, zlib.crc32(rest), rest)

    def _line(self, state: SchedulerState, entry: Entry) -> bytes:
        waits_for = state.waits_for(entry.skill)
        known = self._lines.get(entry.skill)
        if known is not None and known[0] is entry and known[1] == waits_for:
            return known[2]
        line = _DUMP(_line_of(entry, waits_for)).encode()
        self._lines[entry.skill] = (entry, waits_for, line)
        return line


def decode(content: bytes, path: str) -> SchedulerState:
    """Return the state in the content of scheduler_state.json, which was found at `path`.

    Raises:
      FormatVersionError, FileRefusedError: as `StateFile.load`.
    """
    document = _document(content, path)
    try:
        lines = records.from_json(tuple[Mapping[str, Any], ...], document["skills"])
        lines = [_entry_values(line, order) for order, line in enumerate(lines)]
        values = {
            "entries": {values["skill"]: values for values in lines},
            "next_expert": document["next_expert"],
            "stop_mode": document["stop_mode"],
            "responses": document["requests"],
        }
        state = records.from_json(SchedulerState, values)
        skills = [(entry.skill, entry.needs, entry.expert) for entry in state.entries.values()]
        check_new_skills([NewSkill(skill=s, needs=n, expert=e) for s, n, e in skills], {})
        return state
    except (KeyError, TypeError, ValueError, GraphError, NameRefusedError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from error


def _document(content: bytes, path: str) -> dict[str, Any]:
    """The JSON object in scheduler_state.json, once its checksum holds."""
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


def _damaged(path: str, why: str) -> FileRefusedError:
    return FileRefusedError(
        f"{path} is damaged ({why}); restore it from a copy, or run {_recovery(path)}: what has "
        "been trained is in checkpoints/ and is found again"
    )


def _recovery(path: str) -> str:
    return f"`flowrl recover {Path(path).parent}`"


def _line_of(entry: Entry, waits_for: tuple[str, ...]) -> dict[str, Any]:
    """The entry as JSON values; but for the first six, those with default values are left out."""
    status = entry.status
    line: dict[str, Any] = {
        "skill": entry.skill,
        "status": status.kind,
        "expert": entry.expert,
        "attempt": None,
        "needs": entry.needs,
        "waits_for": waits_for,
    }
    if isinstance(status, Running) and entry.expert is not None:
        session = status.handle.session if status.handle else None
        line["session"] = session or session_name(entry.expert, entry.skill)
    for item in (*fields(status), *fields(entry)):
        value = getattr(status if hasattr(status, item.name) else entry, item.name)
        if item.name not in ("status", "order") and (item.name in line or value != item.default):
            line[item.name] = records.to_json(value)
    return line


def _entry_values(line: Mapping[str, Any], order: int) -> dict[str, Any]:
    """The JSON values of an `Entry` that a line holds."""
    status = {name: line[name] for name in line.keys() - _ENTRY - _DERIVED}
    if line["attempt"] is None:
        status.pop("attempt")
    if "device" in status:  # written before a run could have several
        device = status.pop("device")
        status["devices"] = [device] if device else []
    values = {name: line[name] for name in line.keys() & _ENTRY}
    return values | {"order": order, "status": {"kind": line["status"], **status}}
