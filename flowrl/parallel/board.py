"""The scheduler's book: all entries, and an index that keeps a beat cheap for 10,000 skills."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from flowrl.layout import slug
from flowrl.parallel.status import Active, Completed, Entry, Waiting

Rank = tuple[int, int, str]  # -priority, order, skill


@dataclass(frozen=True, slots=True)
class Index:
    """What follows from the entries; `Index.of` says how, `Draft` keeps it up to date."""

    dependants: Mapping[str, tuple[str, ...]]  # skill → the skills that need it directly
    missing: Mapping[str, int]  # skill → how many of its needs are not completed
    ready: tuple[Rank, ...]  # waiting, with no need missing; sorted
    active: tuple[Rank, ...]  # preparing, running or merging; sorted
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
            missing=missing,
            ready=tuple(sorted(map(rank, ready))),
            active=tuple(sorted(map(rank, active))),
            names={slug(name): name for name in entries},
        )


@dataclass(frozen=True, slots=True)
class SchedulerState:
    """Everything the scheduler knows; a value, replaced by `step` and never changed."""

    entries: Mapping[str, Entry] = field(default_factory=dict)  # by skill, in order of insertion
    next_expert: int = 0  # never handed out before
    index: Index = field(default_factory=lambda: Index.of({}), repr=False, compare=False)

    @classmethod
    def of(cls, entries: Iterable[Entry], *, next_expert: int) -> SchedulerState:
        """The state with these entries."""
        book = {entry.skill: entry for entry in entries}
        return cls(book, next_expert, Index.of(book))

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
            isinstance(entry.status, Completed) for entry in self.entries.values()
        )

    def active(self) -> tuple[Entry, ...]:
        """The entries that are preparing, running or merging, in order of rank."""
        return tuple(self.entries[name] for *_, name in self.index.active)

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
