"""The scheduler's state: an immutable value, the builder of the next one, and its file.

`SchedulerState` holds one entry per skill. What follows from the entries (which skills are ready,
active or blocked) is computed when it is needed; 1,000 skills take less than a millisecond.

scheduler_state.json is valid JSON with one line per skill, for the scheduler, for people and for
jq. Every line has `skill`, `status`, `expert`, `attempt`, `needs` and `waits_for`, and the other
fields of its status: `session`, `devices`, `blocked_by`, `frames`, `success_rate`, `why` and more.
Fields with their default value are left out, which jq reads as null. Times are ISO 8601 in UTC.
`requests` holds the responses to the last requests, `stop_mode` whether a user stops the daemon.
The first line holds the CRC32 of all that follows, so a flipped bit is never read as a state.
"""

from __future__ import annotations

import json
import re
import shlex
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from functools import cached_property, partial
from graphlib import CycleError, TopologicalSorter
from itertools import filterfalse
from pathlib import Path
from typing import Any

from flowrl import storage
from flowrl.config import ScheduleConfig
from flowrl.errors import (
    FileRefusedError,
    FormatVersionError,
    GraphError,
    NameRefusedError,
    TornFileError,
)
from flowrl.launchers.base import Handle
from flowrl.parallel.events import Command, Response, StatusChange, StopMode
from flowrl.parallel.status import (
    Active,
    Blocked,
    Completed,
    Entry,
    Failed,
    Held,
    Merging,
    Running,
    Slotted,
    Waiting,
)
from flowrl.paths import display_name, slug
from flowrl.storage import records
from flowrl.storage.records import Natural

_FORMAT = 1
_HEAD = re.compile(rb'\{"format": [0-9]+, "crc32": "([0-9a-f]{8})",\n')
_BETWEEN = b",\n"
_ENTRY = frozenset(item.name for item in fields(Entry)) - {"status"}
_DERIVED = frozenset({"status", "waits_for", "session"})  # keys for people, and the status's kind
_DUMP = json.JSONEncoder(allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode


@dataclass(frozen=True, slots=True)
class SchedulerState:
    """Everything the scheduler knows; a value, replaced by `step` and never changed."""

    entries: Mapping[str, Entry] = field(default_factory=dict)  # by skill, in order of insertion
    next_expert: Natural = 0  # never given to a skill before
    stop_mode: StopMode = StopMode.NONE
    responses: tuple[Response, ...] = ()  # to the last requests, oldest first

    @property
    def settled(self) -> bool:
        """True if every skill is completed, failed, held or blocked: nothing moves by itself.

        A skill that waits for another has, at the end of that chain, one ready or active.
        """
        return not (self.active() or ready_entries(self.entries))

    @property
    def complete(self) -> bool:
        """True if every skill is completed."""
        return all(isinstance(entry.status, Completed) for entry in self.entries.values())

    @property
    def stop_is_due(self) -> bool:
        """True if a user wants the daemon to end, and its runs have ended."""
        match self.stop_mode:
            case StopMode.STOP:
                return not self.active()
            case StopMode.STOP_NOW:
                return not self.launched()
            case _:
                return False

    def active(self) -> list[Entry]:
        """The entries as `active_entries` returns them."""
        return active_entries(self.entries)

    def launched(self) -> list[tuple[Entry, Handle]]:
        """The entries whose run has a process, in order of rank."""
        return [
            (entry, entry.status.handle)
            for entry in self.active()
            if isinstance(entry.status, Running) and entry.status.handle is not None
        ]

    def waits_for(self, skill: str) -> tuple[str, ...]:
        """The needs of a skill that are not completed."""
        return tuple(n for n in self.entries[skill].needs if not self.is_completed(n))

    def is_completed(self, skill: str) -> bool:
        """Return whether the skill's expert is in the global checkpoint."""
        return isinstance(self.entries[skill].status, Completed)


class StateBuilder:
    """The next state in the making; it reports every change of a status to `commands`."""

    def __init__(
        self, state: SchedulerState, commands: list[Command], *, needs_success_rate: float
    ) -> None:
        self._state = state
        self._least = needs_success_rate
        self.entries = dict(state.entries)
        self.next_expert = state.next_expert
        self.stop_mode = state.stop_mode
        self.responses = state.responses
        self._commands = commands

    def build(self) -> SchedulerState:
        """Return the new state; the first one itself when nothing has changed."""
        new = SchedulerState(self.entries, self.next_expert, self.stop_mode, self.responses)
        return self._state if new == self._state else new

    def expert_of(self, skill: str) -> int:
        """Return the skill's expert number; the first call gives it one."""
        entry = self.entries[skill]
        if entry.expert is None:
            entry = self.entries[skill] = replace(entry, expert=self.next_expert)
            self.next_expert += 1
        assert entry.expert is not None
        return entry.expert

    def put(self, entry: Entry) -> None:
        """Replace an entry; the skills that need it become blocked or unblocked."""
        before = self._roots(self.entries[entry.skill])
        self._write(entry)
        if before != self._roots(self.entries[entry.skill]):
            self.block_dependants(entry.skill)

    def block_dependants(self, skill: str) -> None:
        """Block or unblock the skills that need this one, and those that need them."""
        stack = [skill]
        while stack:
            dependants = self._dependants.get(stack.pop(), ())
            stack += [name for name in dependants if self._write(self.entries[name])]

    @cached_property
    def _dependants(self) -> dict[str, list[str]]:
        """The skills that need each skill, in order of insertion."""
        found: dict[str, list[str]] = {}
        for entry in self.entries.values():
            for need in entry.needs:
                found.setdefault(need, []).append(entry.skill)
        return found

    def add(self, skills: Sequence[Entry]) -> None:
        """Add skills, all of them or none; raises as `check_new_skills` does."""
        order = check_new_skills(skills, self.entries)
        vars(self).pop("_dependants", None)
        for item in skills:
            self.entries[item.skill] = item
            if item.expert is not None:
                self.next_expert = max(self.next_expert, item.expert + 1)
        for name in order:
            entry = self.entries[name] = self._with_blockers(self.entries[name])
            self._commands.append(StatusChange(None, entry))

    def _write(self, entry: Entry) -> bool:
        """Write an entry, blocked if a need blocks it; return whether its status has changed."""
        entry = self._with_blockers(entry)
        before = self.entries[entry.skill]
        self.entries[entry.skill] = entry
        if before.status == entry.status:
            return False
        self._commands.append(StatusChange(before.status, entry))
        return True

    def _with_blockers(self, entry: Entry) -> Entry:
        """Return the entry, blocked or waiting as its needs say; a run that has begun goes on."""
        status = entry.status
        if not isinstance(status, Waiting | Blocked) or status.run_id is not None:
            return entry
        waiting = status.waiting if isinstance(status, Blocked) else status
        needs = (self.entries[need] for need in entry.needs)
        by = tuple(dict.fromkeys(name for need in needs for name in self._roots(need)))
        if by:
            blockers = (self.entries[name] for name in by)
            why = "; ".join(filter(None, (self._shortage(blocker) for blocker in blockers)))
            return replace(entry, status=Blocked(blocked_by=by, why=why, waiting=waiting))
        return replace(entry, status=waiting)

    def _roots(self, entry: Entry) -> tuple[str, ...]:
        """The skills that keep dependants of this entry from starting."""
        if isinstance(entry.status, Failed | Held) or self._shortage(entry):
            return (entry.skill,)
        return entry.status.blocked_by if isinstance(entry.status, Blocked) else ()

    def _shortage(self, entry: Entry) -> str:
        """Return a completed skill's success rate, if it is too low for others to build on."""
        status = entry.status
        if not isinstance(status, Completed) or status.success_rate >= self._least:
            return ""
        return f"{entry.skill} has {status.success_rate:.1%} of {self._least:.1%}"


def active_entries(entries: Mapping[str, Entry]) -> list[Entry]:
    """The entries that are preparing, running or merging, in order of rank."""
    return sorted((e for e in entries.values() if isinstance(e.status, Active)), key=_rank)


def ready_entries(entries: Mapping[str, Entry]) -> list[Entry]:
    """The entries that only lack a slot or wait for a time, in order of rank."""
    completed = _completed(entries)
    return sorted((e for e in entries.values() if _is_ready(e, completed)), key=_rank)


def _completed(entries: Mapping[str, Entry]) -> set[str]:
    return {name for name, entry in entries.items() if isinstance(entry.status, Completed)}


def _is_ready(entry: Entry, completed: set[str]) -> bool:
    """Return whether nothing but a slot or the clock keeps this skill from starting or going on."""
    status = entry.status
    return isinstance(status, Waiting) and (
        status.run_id is not None or completed.issuperset(entry.needs)
    )


class Slots:
    """The devices' free slots; `devices` says how many runs share a device.

    A run gets all of its devices in one step or none, so no run holds some while it waits for
    others. One whose last attempt ran out of memory shares them with no other run. Without devices
    only the number of runs is limited.
    """

    def __init__(
        self, schedule: ScheduleConfig, devices: Mapping[str, int], active: Iterable[Entry]
    ) -> None:
        self._most = devices
        self._wanted = schedule.devices_per_run if devices else 0
        self._runs_left = schedule.max_parallel_skills
        self._load: Counter[str] = Counter()
        for entry in active:
            if isinstance(entry.status, Slotted):
                self._occupy(entry.status.devices, alone=entry.status.alone)

    @property
    def full(self) -> bool:
        """True if no further run may start, whatever devices are free."""
        return self._runs_left <= 0

    def take(self, *, alone: bool) -> tuple[str, ...] | None:
        """Occupy and return the devices with most slots free; None if the run does not fit."""
        if self.full:
            return None
        free = [n for n, most in self._most.items() if self._load[n] < (1 if alone else most)]
        if len(free) < self._wanted:
            return None
        least = sorted(free, key=lambda name: self._load[name] / self._most[name])[: self._wanted]
        devices = tuple(name for name in self._most if name in least)
        self._occupy(devices, alone=alone)
        return devices

    def _occupy(self, devices: tuple[str, ...], *, alone: bool) -> None:
        self._runs_left -= 1
        for name in devices:
            self._load[name] += self._most.get(name, 1) if alone else 1


def next_due(state: SchedulerState, *, after: datetime) -> datetime | None:
    """The next time at which a wait for `not_before` is over; None when nothing waits for one."""
    times = [
        entry.status.not_before
        for entry in state.entries.values()
        if isinstance(entry.status, Waiting | Merging) and entry.status.not_before is not None
    ]
    return min((time for time in times if time > after), default=None)


def check_new_skills(skills: Sequence[Entry], known: Mapping[str, Entry]) -> tuple[str, ...]:
    """Check skills that are to be added to `known`; return their names, needs first.

    NameRefusedError: a name cannot be used, or two share a slug. GraphError: the skill is there
    already, needs an unknown one, or needs itself.
    """
    new: dict[str, Entry] = {}
    for item in skills:
        if item.skill in known or item.skill in new:
            raise GraphError(f"the skill {item.skill!r} is there already; add it once")
        new[item.skill] = item
    _check_names(new, known)
    for name, item in new.items():
        for need in item.needs:
            if need not in known and need not in new:
                raise GraphError(f"{name!r} needs {need!r}, which is not there; add it first")
    graph = {name: [n for n in item.needs if n not in known] for name, item in new.items()}
    try:
        return tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        circle = " → ".join(error.args[1])
        raise GraphError(f"these skills need one another in a circle: {circle}") from error


def _check_names(new: Mapping[str, Entry], known: Mapping[str, Entry]) -> None:
    """Names are as they are shown, and no two skills share a folder's name or an expert number."""
    folders = {slug(name): name for name in known}
    experts = {entry.expert: name for name, entry in known.items()}
    for name, item in new.items():
        if name != (right := display_name(name)):
            raise NameRefusedError(f"the skill name {name!r} should be {right!r}")
        if (other := folders.setdefault(slug(name), name)) != name:
            raise NameRefusedError(
                f"the skills {other!r} and {name!r} would share the folder name "
                f"{slug(name)}; rename one of them"
            )
        if item.expert is None:
            continue
        if (owner := experts.setdefault(item.expert, name)) != name:
            raise GraphError(f"{name!r} cannot be expert {item.expert}, which {owner!r} is already")


def _rank(entry: Entry) -> tuple[float, int]:
    """Return an entry's place in the queue, where equals stand in the order of their insertion.

    One that gave its slot to others stands last.
    """
    status = entry.status
    queued_at = status.queued_at if isinstance(status, Waiting) else None
    return (queued_at.timestamp() if queued_at else 0.0, -entry.priority)


# scheduler_state.json


class StateFile:
    """scheduler_state.json of one graph; keeps the lines it wrote, so that saving is quick."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines: dict[str, tuple[Entry, tuple[str, ...], bytes]] = {}

    def load(self) -> SchedulerState | None:
        """Return the saved state, or None when there is no file.

        FileRefusedError: it cannot be read or trusted, or is of another version; it stays as it is.
        """
        if not self.path.exists() and not self.path.is_symlink():
            return None
        remedy = f"restore it from a copy, or run {_recovery(str(self.path))}"
        parse = partial(decode, path=str(self.path))
        return storage.read_parsed(self.path, parse, remedy=remedy)

    def save(self, state: SchedulerState) -> None:
        """Replace the file atomically."""
        storage.write_atomic(self.path, self.encode(state))

    def encode(self, state: SchedulerState) -> bytes:
        """Return the file's content; the line of an unchanged entry is used again."""
        first = _DUMP({"next_expert": state.next_expert, "stop_mode": state.stop_mode})[1:-1]
        responses = _BETWEEN.join(_DUMP(records.to_json(one)).encode() for one in state.responses)
        completed = _completed(state.entries)
        lines = _BETWEEN.join(self._line(entry, completed) for entry in state.entries.values())
        parts = (first.encode(), responses, lines)
        rest = b'%s,"requests": [\n%s\n],"skills": [\n%s\n]}\n' % parts
        return b'{"format": %d, "crc32": "%08x",\n%s' % (_FORMAT, zlib.crc32(rest), rest)

    def _line(self, entry: Entry, completed: set[str]) -> bytes:
        waits_for = tuple(filterfalse(completed.__contains__, entry.needs))
        known = self._lines.get(entry.skill)
        if known is not None and known[0] is entry and known[1] == waits_for:
            return known[2]
        line = _DUMP(_line_of(entry, waits_for)).encode()
        self._lines[entry.skill] = (entry, waits_for, line)
        return line


def decode(content: bytes, path: str) -> SchedulerState:
    """Return the state in the content of the file at `path`; raises as `StateFile.load`."""
    document = _document(content, path)
    try:
        lines = records.from_json(tuple[Mapping[str, Any], ...], document["skills"])
        values = {
            "entries": {line["skill"]: _entry_values(line) for line in lines},
            "next_expert": document["next_expert"],
            "stop_mode": document["stop_mode"],
            "responses": document["requests"],
        }
        state = records.from_json(SchedulerState, values)
        check_new_skills(tuple(state.entries.values()), {})
        for entry in state.entries.values():
            if entry.expert is None and isinstance(entry.status, Active | Completed):
                raise ValueError(f"{entry.skill!r} is {entry.status.kind} without an expert")
        blocked = [e.status for e in state.entries.values() if isinstance(e.status, Blocked)]
        if unknown := {name for each in blocked for name in each.blocked_by} - state.entries.keys():
            raise ValueError(f"{min(unknown)!r} blocks a skill, and is not there")
        return state
    except (KeyError, TypeError, ValueError, GraphError, NameRefusedError) as error:
        raise FileRefusedError(_damaged(path, f"{type(error).__name__}: {error}")) from error


def _document(content: bytes, path: str) -> dict[str, Any]:
    """The JSON object in scheduler_state.json, once its checksum holds."""
    head = _HEAD.match(content)
    if head is not None and int(head[1], 16) != zlib.crc32(content[head.end() :]):
        raise TornFileError(_damaged(path, "its checksum does not hold"))
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise TornFileError(_damaged(path, f"{type(error).__name__}: {error}")) from error
    version = document.get("format") if isinstance(document, dict) else None
    if version != _FORMAT:
        raise FormatVersionError(
            f"{path} has format {version!r}, this flowrl reads {_FORMAT}; go on with the version "
            f"of flowrl that wrote it, or move the file away and run {_recovery(path)}"
        )
    if head is None:
        raise FileRefusedError(_damaged(path, "its first line is not as it was written"))
    return document


def _damaged(path: str, why: str) -> str:
    return (
        f"{path} is damaged ({why}); restore it from a copy, or run {_recovery(path)}: what has "
        "been trained is in checkpoints/ and is found again"
    )


def _recovery(path: str) -> str:
    return f"`flowrl recover {shlex.quote(str(Path(path).parent))}`"


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
    if session := entry.session:
        line["session"] = session
    for item in (*fields(status), *fields(entry)):
        value = getattr(status if hasattr(status, item.name) else entry, item.name)
        if item.name != "status" and (item.name in line or value != item.default):
            line[item.name] = records.to_json(value)
    if isinstance(status, Running) and status.handle and not status.handle.engine:
        for name in ("engine", "engine_id"):  # an older flowrl does not know them
            del line["handle"][name]
    return line


def _entry_values(line: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON values of an `Entry` that a line holds."""
    status = {name: line[name] for name in line.keys() - _ENTRY - _DERIVED}
    if line["attempt"] is None:
        status.pop("attempt")
    values = {name: line[name] for name in line.keys() & _ENTRY}
    return values | {"status": {"kind": line["status"], **status}}
