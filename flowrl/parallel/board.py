"""The scheduler's book: all entries, and an index that keeps a beat cheap for 10,000 skills."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from flowrl.launchers.job import Handle
from flowrl.parallel.asks import Answer, Wish
from flowrl.parallel.pages import Pages
from flowrl.parallel.status import Active, Completed, Entry, Merging, Running, Waiting
from flowrl.paths import slug

Rank = tuple[int, int, str]  # -priority, order, skill
Due = tuple[datetime, str]


@dataclass(frozen=True, slots=True)
class Index:
    """What follows from the entries; `Index.of` says how, `Draft` keeps it up to date."""

    dependants: Mapping[str, tuple[str, ...]]  # skill → the skills that need it directly
    missing: Pages[int]  # skill → how many of its needs are not completed
    ready: tuple[Rank, ...]  # waiting, with no need missing; sorted
    active: tuple[Rank, ...]  # preparing, running or merging; sorted
    timed: tuple[Due, ...]  # ready or merging, not before a certain time; sorted
    names: Mapping[str, str]  # slug → skill

    @classmethod
    def of(cls, entries: Mapping[str, Entry]) -> Index:
        """The index of these entries, from scratch."""
        dependants: dict[str, list[str]] = {name: [] for name in entries}
        for entry in entries.values():
            for need in entry.needs:
                dependants[need].append(entry.skill)
        missing = {
            name: sum(not isinstance(entries[need].status, Completed) for need in entry.needs)
            for name, entry in entries.items()
        }
        ready = (e for e in entries.values() if is_ready(e, missing[e.skill]))
        active = (e for e in entries.values() if isinstance(e.status, Active))
        return cls(
            dependants={name: tuple(users) for name, users in dependants.items()},
            missing=Pages(missing),
            ready=tuple(sorted(map(rank, ready))),
            active=tuple(sorted(map(rank, active))),
            timed=tuple(sorted(due for e in entries.values() if (due := due_of(e)))),
            names={slug(name): name for name in entries},
        )


@dataclass(frozen=True, slots=True)
class SchedulerState:
    """Everything the scheduler knows; a value, replaced by `step` and never changed."""

    entries: Pages[Entry] = field(default_factory=Pages[Entry])  # by skill, in order of insertion
    next_expert: int = 0  # never handed out before
    index: Index = field(default_factory=lambda: Index.of({}), repr=False, compare=False)
    wish: Wish = Wish.NOTHING  # of a user, for the daemon itself
    answers: tuple[Answer, ...] = ()  # to the last requests, oldest first

    @classmethod
    def of(
        cls,
        entries: Iterable[Entry],
        *,
        next_expert: int,
        wish: Wish = Wish.NOTHING,
        answers: tuple[Answer, ...] = (),
    ) -> SchedulerState:
        """The state with these entries."""
        book = {entry.skill: entry for entry in entries}
        return cls(Pages(book), next_expert, Index.of(book), wish, answers)

    @property
    def settled(self) -> bool:
        """Nothing will move by itself: every skill is completed, failed, held or blocked.

        A skill that waits for another has, at the end of that chain, one ready or active.
        """
        return not self.index.ready and not self.index.active

    @property
    def complete(self) -> bool:
        """Every skill is completed."""
        return self.settled and all(
            isinstance(entry.status, Completed) for entry in self.entries.in_order()
        )

    def active(self) -> tuple[Entry, ...]:
        """The entries that are preparing, running or merging, in order of rank."""
        return tuple(self.entries[name] for *_, name in self.index.active)

    def launched(self) -> list[tuple[Entry, Handle]]:
        """The entries whose run has a process, in order of rank."""
        return [
            (entry, entry.status.handle)
            for entry in self.active()
            if isinstance(entry.status, Running) and entry.status.handle is not None
        ]

    @property
    def stop_is_due(self) -> bool:
        """Whether a user wants the daemon to end, and its runs have come to their end."""
        match self.wish:
            case Wish.STOP:
                return not self.index.active
            case Wish.STOP_NOW:
                return not self.launched()
            case _:
                return False

    def waits_for(self, skill: str) -> tuple[str, ...]:
        """The needs of a skill that are not completed."""
        if not self.index.missing[skill]:
            return ()
        needs = self.entries[skill].needs
        return tuple(n for n in needs if not isinstance(self.entries[n].status, Completed))


def rank(entry: Entry) -> Rank:
    """Where an entry stands in the queue: by priority, then by insertion."""
    return (-entry.priority, entry.order, entry.skill)


def is_ready(entry: Entry, missing: int) -> bool:
    """Whether nothing but a slot or the clock keeps this skill from starting."""
    return not missing and isinstance(entry.status, Waiting)


def due_of(entry: Entry) -> Due | None:
    """When this entry may move on by itself, if it waits for a certain time."""
    status = entry.status
    if isinstance(status, Waiting | Merging) and status.not_before is not None:
        return status.not_before, entry.skill
    return None
