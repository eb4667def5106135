"""A scheduler state in the making, with its index kept up to date entry by entry."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from flowrl.parallel.adding import checked
from flowrl.parallel.asks import Answer, Wish
from flowrl.parallel.board import Due, Index, Rank, SchedulerState, due_of, is_ready, rank
from flowrl.parallel.pages import EditedPages
from flowrl.parallel.signals import NewSkill
from flowrl.parallel.status import Active, Blocked, Completed, Entry, Failed, Held, Status, Waiting
from flowrl.paths import slug

MOST_ANSWERS = 100  # to requests; more than are ever taken at once
Key = TypeVar("Key", Rank, Due)
_UNBORN = Entry(skill="", needs=(), order=-1)  # stands in for a skill that is being added


class Draft:
    """A state in the making; remembers every move."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._touched = False
        self.entries = EditedPages(state.entries)
        self.next_expert = state.next_expert
        self.wish = state.wish
        self.answers = state.answers
        self.moves: list[tuple[Status | None, Entry]] = []
        self._dependants = state.index.dependants
        self._names = state.index.names
        self._missing = EditedPages(state.index.missing)
        self.ready = list(state.index.ready)
        self.active = list(state.index.active)
        self._timed = list(state.index.timed)

    def close(self) -> SchedulerState:
        """The new state; the old one itself when nothing changed."""
        if not self._touched:
            return self._state
        index = Index(
            dependants=self._dependants,
            missing=self._missing.close(),
            ready=tuple(self.ready),
            active=tuple(self.active),
            timed=tuple(self._timed),
            names=self._names,
        )
        entries = self.entries.close()
        return SchedulerState(entries, self.next_expert, index, self.wish, self.answers)

    def want(self, wish: Wish) -> None:
        """What a user wants of the daemon itself."""
        if wish is not self.wish:
            self.wish, self._touched = wish, True

    def answer(self, answer: Answer) -> None:
        """Remember the answer to a request; the oldest ones are forgotten."""
        self.answers = (*self.answers, answer)[-MOST_ANSWERS:]
        self._touched = True

    def put(self, entry: Entry) -> None:
        """Replace an entry; its dependants become blocked or unblocked by it."""
        stuck_before = _stuck(self.entries[entry.skill].status)
        self._place(self._settled(entry))
        stack = [entry.skill] if stuck_before != _stuck(self.entries[entry.skill].status) else []
        while stack:
            for name in self._dependants[stack.pop()]:
                other = self.entries[name]
                settled = self._settled(other)
                if settled is not other:
                    self._place(settled)
                    stack.append(name)

    def expert_of(self, skill: str) -> int:
        """The skill's expert number; its first call gives it one."""
        entry = self.entries[skill]
        if entry.expert is not None:
            return entry.expert
        number = self.next_expert
        self.next_expert += 1
        self._touched = True
        self.entries[skill] = replace(entry, expert=number)
        return number

    def add(self, skills: Sequence[NewSkill]) -> None:
        """Add skills, all of them or none.

        Raises:
          NameRefusedError: a name cannot be used, or two share a slug.
          GraphError: a skill is there already, needs what nobody knows, or needs itself.
        """
        fresh, order = checked(skills, self.entries.reader(), self._names)
        self._names = {**self._names, **{slug(name): name for name in fresh}}
        self._dependants = _with_dependants(self._dependants, fresh)
        first = len(self.entries)
        orders = {name: first + number for number, name in enumerate(fresh)}
        for name in fresh:  # keeps the order of insertion
            self.entries[name] = _UNBORN
            self._missing[name] = 0
        for name in order:
            self._insert(fresh[name], orders[name])

    def _insert(self, item: NewSkill, order: int) -> None:
        entry = Entry(
            skill=item.skill,
            needs=item.needs,
            order=order,
            priority=item.priority,
            expert=item.expert,
            status=item.status,
        )
        if item.expert is not None:
            self.next_expert = max(self.next_expert, item.expert + 1)
        self._missing[item.skill] = sum(
            not isinstance(self.entries[need].status, Completed) for need in item.needs
        )
        self._place(self._settled(entry))

    def _place(self, entry: Entry) -> None:
        """Write an entry and what follows from it, except for its dependants' being blocked."""
        known = self.entries[entry.skill]
        before = None if known is _UNBORN else known
        self._touched = True
        self.entries[entry.skill] = entry
        if before is None or before.status != entry.status:
            self.moves.append((None if before is None else before.status, entry))
        self._sort_in(before, entry)
        was_completed = before is not None and isinstance(before.status, Completed)
        if isinstance(entry.status, Completed) and not was_completed:
            self._count_down(entry.skill)

    def _sort_in(self, before: Entry | None, entry: Entry) -> None:
        missing = self._missing[entry.skill]
        if before is not None:
            _drop(self.ready, rank(before) if is_ready(before, missing) else None)
            _drop(self.active, rank(before) if isinstance(before.status, Active) else None)
            _drop(self._timed, due_of(before))
        _keep(self.ready, rank(entry) if is_ready(entry, missing) else None)
        _keep(self.active, rank(entry) if isinstance(entry.status, Active) else None)
        _keep(self._timed, due_of(entry))

    def _count_down(self, skill: str) -> None:
        for name in self._dependants[skill]:
            if self.entries[name] is _UNBORN:
                continue  # it counts for itself
            self._missing[name] -= 1
            if is_ready(self.entries[name], self._missing[name]):
                insort(self.ready, rank(self.entries[name]))

    def _settled(self, entry: Entry) -> Entry:
        """The entry, blocked when a need is stuck and waiting again when none is."""
        if not isinstance(entry.status, Waiting | Blocked):
            return entry
        by = self._blockers(entry)
        if by:
            blocked = Blocked(by=by)
            return entry if entry.status == blocked else replace(entry, status=blocked)
        return replace(entry, status=Waiting()) if isinstance(entry.status, Blocked) else entry

    def _blockers(self, entry: Entry) -> tuple[str, ...]:
        if not self._missing[entry.skill]:
            return ()
        by: dict[str, None] = {}
        for need in entry.needs:
            for name in _stuck(self.entries[need].status) or ():
                by[name or need] = None
        return tuple(by)


def _stuck(status: Status) -> tuple[str, ...] | None:
    """Who keeps dependants from going on: the root causes, "" for the skill itself, or nobody."""
    if isinstance(status, Failed | Held):
        return ("",)
    return status.by if isinstance(status, Blocked) else None


def _keep(keys: list[Key], key: Key | None) -> None:
    """Sort a key in, if there is one."""
    if key is not None:
        insort(keys, key)


def _drop(keys: list[Key], key: Key | None) -> None:
    """Take a key out of a sorted list, if there is one."""
    if key is not None:
        del keys[bisect_left(keys, key)]


def _with_dependants(
    known: Mapping[str, tuple[str, ...]], fresh: Mapping[str, NewSkill]
) -> dict[str, tuple[str, ...]]:
    dependants = {**known, **dict.fromkeys(fresh, ())}
    users: dict[str, list[str]] = {}
    for name, item in fresh.items():
        for need in item.needs:
            users.setdefault(need, []).append(name)
    for need, names in users.items():
        dependants[need] = (*dependants[need], *names)
    return dependants
