"""The scheduler's state as an immutable value, and the builder of the next one.

`SchedulerState` holds one entry per skill. What follows from the entries (which skills are ready,
active or blocked) is computed when it is needed; 1,000 skills take less than a millisecond.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from graphlib import CycleError as Circle
from graphlib import TopologicalSorter

from flowrl import paths
from flowrl.errors import CycleError, GraphError, NameRefusedError, UnknownNeedError
from flowrl.launchers.base import Handle
from flowrl.parallel.events import Command, NewSkill, Response, StatusChange, StopMode
from flowrl.parallel.status import (
    Active,
    Blocked,
    Completed,
    Entry,
    Failed,
    Held,
    Merging,
    Running,
    Waiting,
)
from flowrl.storage.records import Natural


@dataclass(frozen=True, slots=True)
class SchedulerState:
    """Everything the scheduler knows; a value, replaced by `step` and never changed."""

    entries: Mapping[str, Entry] = field(default_factory=dict)  # by skill, in order of insertion
    next_expert: Natural = 0  # never given to a skill before
    stop_mode: StopMode = StopMode.NONE
    responses: tuple[Response, ...] = ()  # to the last requests, oldest first

    @property
    def settled(self) -> bool:
        """Whether every skill is completed, failed, held or blocked: nothing moves by itself.

        A skill that waits for another has, at the end of that chain, one ready or active.
        """
        return not any(
            isinstance(entry.status, Active) or is_ready(entry, self.entries)
            for entry in self.entries.values()
        )

    @property
    def complete(self) -> bool:
        """Whether every skill is completed."""
        return all(isinstance(entry.status, Completed) for entry in self.entries.values())

    @property
    def stop_is_due(self) -> bool:
        """Whether a user wants the daemon to end, and its runs have ended."""
        match self.stop_mode:
            case StopMode.STOP:
                return not self.active()
            case StopMode.STOP_NOW:
                return not self.launched()
            case _:
                return False

    def active(self) -> list[Entry]:
        """The entries that are preparing, running or merging, in order of rank."""
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
        needs = self.entries[skill].needs
        return tuple(n for n in needs if not isinstance(self.entries[n].status, Completed))


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
            need = stack.pop()
            for item in tuple(self.entries.values()):
                if need in item.needs and self._write(item):
                    stack.append(item.skill)

    def add(self, skills: Sequence[NewSkill]) -> None:
        """Add skills, all of them or none.

        Raises:
          NameRefusedError: a name cannot be used, or two share a slug.
          GraphError: a skill is there already, needs an unknown one, or needs itself.
        """
        order = check_new_skills(skills, self.entries)
        for item in skills:
            self.entries[item.skill] = Entry(
                skill=item.skill,
                needs=item.needs,
                order=len(self.entries),
                status=item.status,
                priority=item.priority,
                expert=item.expert,
                trained=item.trained,
            )
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
        """The entry, blocked if a need keeps it from starting, and waiting again if none does.

        A run that has begun goes on.
        """
        status = entry.status
        if not isinstance(status, Waiting | Blocked) or getattr(status, "run_id", None):
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
        """How often a completed skill succeeds, if that is too seldom for it to be built on."""
        status = entry.status
        if not isinstance(status, Completed) or status.success_rate >= self._least:
            return ""
        return f"{entry.skill} has {status.success_rate:.1%} of {self._least:.1%}"


def active_entries(entries: Mapping[str, Entry]) -> list[Entry]:
    """The entries that are preparing, running or merging, in order of rank."""
    return sorted((e for e in entries.values() if isinstance(e.status, Active)), key=_rank)


def ready_entries(entries: Mapping[str, Entry]) -> list[Entry]:
    """The entries that only lack a slot or wait for a time, in order of rank."""
    return sorted((e for e in entries.values() if is_ready(e, entries)), key=_rank)


def is_ready(entry: Entry, entries: Mapping[str, Entry]) -> bool:
    """Whether nothing but a slot or the clock keeps this skill from starting or going on."""
    status = entry.status
    return isinstance(status, Waiting) and (
        status.run_id is not None
        or all(isinstance(entries[need].status, Completed) for need in entry.needs)
    )


def next_due(state: SchedulerState, *, after: datetime) -> datetime | None:
    """The next time at which a wait for `not_before` is over; None when nothing waits for one."""
    times = [
        entry.status.not_before
        for entry in state.entries.values()
        if isinstance(entry.status, Waiting | Merging) and entry.status.not_before is not None
    ]
    return min((time for time in times if time > after), default=None)


def check_new_skills(skills: Sequence[NewSkill], known: Mapping[str, Entry]) -> tuple[str, ...]:
    """Check skills that are to be added to `known`; return their names, needs first.

    Raises:
      NameRefusedError: a name cannot be used, or two share a slug.
      GraphError: a skill is there already, needs an unknown one, or needs itself.
    """
    new: dict[str, NewSkill] = {}
    for item in skills:
        if item.skill in known or item.skill in new:
            raise GraphError(f"the skill {item.skill!r} is there already; add it once")
        new[item.skill] = item
    _check_names(new, known)
    for name, item in new.items():
        for need in item.needs:
            if need not in known and need not in new:
                raise UnknownNeedError(f"{name!r} needs {need!r}, which is not there; add it first")
    graph = {name: [n for n in item.needs if n not in known] for name, item in new.items()}
    try:
        return tuple(TopologicalSorter(graph).static_order())
    except Circle as error:
        circle = " → ".join(error.args[1])
        raise CycleError(f"these skills need one another in a circle: {circle}") from error


def _check_names(new: Mapping[str, NewSkill], known: Mapping[str, Entry]) -> None:
    """Names are as they are shown, and no two skills share a folder's name or an expert number."""
    folders = {paths.slug(name): name for name in known}
    experts = {entry.expert: name for name, entry in known.items()}
    for name, item in new.items():
        if name != (right := paths.display_name(name)):
            raise NameRefusedError(f"the skill name {name!r} should be {right!r}")
        if (other := folders.setdefault(paths.slug(name), name)) != name:
            raise NameRefusedError(
                f"the skills {other!r} and {name!r} would share the folder name "
                f"{paths.slug(name)}; rename one of them"
            )
        if item.expert is None:
            continue
        if (owner := experts.setdefault(item.expert, name)) != name:
            raise GraphError(f"{name!r} cannot be expert {item.expert}, which {owner!r} is already")


def _rank(entry: Entry) -> tuple[float, int, int]:
    """Where an entry stands in the queue: by priority, then by insertion.

    One that has given its slot to others stands behind all that have not, the first one first.
    """
    queued_at = getattr(entry.status, "queued_at", None)
    return (queued_at.timestamp() if queued_at else 0.0, -entry.priority, entry.order)
