"""One step of the scheduler: events move entries, moves order acts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import datetime
from typing import Any

from flowrl.parallel import endings, signals, wishes
from flowrl.parallel.asks import Request, Wish
from flowrl.parallel.board import Rank
from flowrl.parallel.draft import Draft
from flowrl.parallel.endings import Beat
from flowrl.parallel.signals import Command, Task
from flowrl.parallel.slots import Slots
from flowrl.parallel.status import (
    Active,
    Asked,
    Entry,
    Failed,
    Held,
    Merging,
    Preparing,
    Running,
    Status,
    Waiting,
)


class Turn:
    """The draft of the next state, the beat, and what has been ordered so far.

    An event that no longer fits its skill's status (of another run, or told twice) is ignored.
    """

    def __init__(self, draft: Draft, beat: Beat) -> None:
        self.draft = draft
        self.commands: list[Command] = []
        self.beat = beat

    def hear(self, event: signals.Event) -> None:
        """Take in one event."""
        HEARS[type(event)](self, event)
        self._announce()

    def start_what_is_due(self) -> None:
        """Order the merges whose time has come, and give free slots to ready skills."""
        for entry in self._entries(self.draft.active):
            status = entry.status
            if isinstance(status, Merging) and status.not_before and self._due(status.not_before):
                self.move(entry, replace(status, not_before=None, why=""))
                self.commands.append(signals.Merge(self._task(entry.skill)))
        launching = self.beat.rules.launching and self.draft.wish is Wish.NOTHING
        if launching and self.draft.ready and not self._merge_is_near():
            self._fill_slots()
        self._announce()

    def _merge_is_near(self) -> bool:
        """Whether a merge is under way: what it makes ready may rank before what is ready now."""
        statuses = (entry.status for entry in self._entries(self.draft.active))
        return any(isinstance(s, Merging) and s.not_before is None for s in statuses)

    def added(self, event: signals.SkillsAdded) -> None:
        """New skills; what is said to be under way is looked for."""
        self.draft.add(event.skills)
        for item in event.skills:
            if isinstance(item.status, Active):
                self._order_again(self.draft.entries[item.skill])

    def expert_wanted(self, event: signals.ExpertWanted) -> None:
        """An expert number ahead of training."""
        self.draft.expert_of(event.skill)

    def prepared(self, event: signals.RunPrepared) -> None:
        """Say that the run will be launched, then launch it."""
        entry = self.draft.entries[event.skill]
        status = entry.status
        if not isinstance(status, Preparing):
            return
        running = Running(
            run_id=event.run_id,
            attempt=status.attempt,
            handle=None,
            device=status.device,
            since=self.beat.now,
            resumed=status.run_id == event.run_id,
            alone=status.alone,
        )
        self.move(entry, running)
        self.commands.append(signals.Launch(self._task(event.skill)))

    def prepare_refused(self, event: signals.PrepareRefused) -> None:
        """Give up: another attempt would meet the same refusal."""
        entry = self.draft.entries[event.skill]
        if isinstance(entry.status, Preparing):
            failed = Failed(why=event.why, attempt=entry.status.attempt, at=self.beat.now)
            self.move(entry, failed)

    def launched(self, event: signals.RunLaunched) -> None:
        """The run has a process."""
        entry = self.draft.entries[event.skill]
        status = entry.status
        if isinstance(status, Running) and status.run_id == event.run_id:
            self.move(replace(entry, refusals=0), replace(status, handle=event.handle))

    def launch_refused(self, event: signals.LaunchRefused) -> None:
        """Try again later."""
        entry = self.draft.entries[event.skill]
        if _is_starting(entry.status):
            self._put(endings.refused(entry, event.why, self.beat))

    def put_off(self, event: signals.PutOff) -> None:
        """Wait for room or for a lock."""
        entry = self.draft.entries[event.skill]
        if _is_starting(entry.status) or isinstance(entry.status, Merging):
            self._put(endings.put_off(entry, event.why, self.beat))

    def ended(self, event: signals.RunEnded) -> None:
        """Merge the run, let it go on, hold it, or charge the attempt."""
        entry = self.draft.entries[event.skill]
        if not isinstance(entry.status, Running) or entry.status.run_id != event.run_id:
            return
        self._put(endings.after_end(entry, event, self.beat))
        if isinstance(self.draft.entries[event.skill].status, Merging):
            self.commands.append(signals.Merge(self._task(event.skill)))

    def hung(self, event: signals.RunHung) -> None:
        """Ask a silent run to end; its end is charged."""
        self._end_for(Asked.HUNG, event)

    def overdue(self, event: signals.RunOverdue) -> None:
        """Ask a run that takes too long to end; its end is charged."""
        self._end_for(Asked.OVERDUE, event)

    def merged(self, event: signals.MergeDone) -> None:
        """The skill is done."""
        entry = self.draft.entries[event.skill]
        status = entry.status
        if isinstance(status, Merging) and status.run_id == event.run_id:
            self._put(endings.completed(entry, status, self.beat))

    def found_merged(self, event: signals.FoundMerged) -> None:
        """The skill was done before the scheduler heard of it."""
        entry = self.draft.entries[event.skill]
        if isinstance(entry.status, Running) and entry.status.run_id == event.run_id:
            self._put(endings.completed(entry, event, self.beat))

    def merge_refused(self, event: signals.MergeRefused) -> None:
        """A result that cannot be merged is an attempt that failed."""
        entry = self.draft.entries[event.skill]
        status = entry.status
        if isinstance(status, Merging) and status.run_id == event.run_id:
            self._put(endings.charged(entry, event.why, status.frames, self.beat))

    def retry(self, event: signals.Retry) -> None:
        """A user wants the skill to train again."""
        wishes.retry(self, self.draft.entries[event.skill])

    def hold(self, event: signals.Hold) -> None:
        """A user wants the skill to pause."""
        wishes.pause(self, self.draft.entries[event.skill], event.why)

    def stopped(self, _event: signals.Stopped) -> None:
        """The wish that the daemon ends is fulfilled."""
        self.draft.want(Wish.NOTHING)

    def restarted(self, _event: signals.Restarted) -> None:
        """Order again what the last daemon may not have carried out; all of it is idempotent."""
        for entry in self._entries(self.draft.active):
            self._order_again(entry)

    def _order_again(self, entry: Entry) -> None:
        task = self._task(entry.skill)
        match entry.status:
            case Preparing():
                self.commands.append(signals.Prepare(task))
            case Running(handle=None):
                self.commands.append(signals.Launch(task, seek=True))
            case Running(asked=asked) if asked:
                self.commands.append(signals.Cancel(task))
            case Merging(not_before=None):
                self.commands.append(signals.Merge(task))
            case _:
                pass

    def _fill_slots(self) -> None:
        slots = Slots(self.beat.rules, self._entries(self.draft.active))
        for _, _, skill in tuple(self.draft.ready):
            if slots.full:
                return
            entry = self.draft.entries[skill]
            status = entry.status
            assert isinstance(status, Waiting)
            if self._due(status.not_before) and slots.fits(alone=status.alone):
                self._start(entry, status, slots.take(alone=status.alone))

    def _start(self, entry: Entry, status: Waiting, device: str | None) -> None:
        preparing = Preparing(
            attempt=status.attempt,
            device=device,
            since=self.beat.now,
            run_id=status.run_id,
            alone=status.alone,
        )
        self.move(replace(entry, expert=self.draft.expert_of(entry.skill)), preparing)
        self.commands.append(signals.Prepare(self._task(entry.skill)))

    def _end_for(self, asked: Asked, event: signals.RunPrepared) -> None:
        """Ask for the scheduler's own reasons, which do not replace a user's."""
        status = self.draft.entries[event.skill].status
        if isinstance(status, Running) and not status.asked:
            self.ask(event.skill, asked, run_id=event.run_id)

    def ask(self, skill: str, asked: Asked, *, run_id: str) -> None:
        """Ask a run to end."""
        entry = self.draft.entries[skill]
        status = entry.status
        if isinstance(status, Running) and status.run_id == run_id and status.asked != asked:
            self.move(entry, replace(status, asked=asked))
            self.commands.append(signals.Cancel(self._task(skill)))

    def hold_back(
        self, entry: Entry, why: str, *, attempt: int = 1, run_id: str | None = None
    ) -> None:
        """Keep a skill from starting."""
        self.move(entry, Held(why=why, attempt=attempt, at=self.beat.now, run_id=run_id))

    def move(self, entry: Entry, status: Status) -> None:
        """Write the entry with another status."""
        self._put(replace(entry, status=status))

    def _put(self, entry: Entry) -> None:
        """Write the entry; the folder of an attempt that failed is put aside."""
        before = self.draft.entries[entry.skill]
        ended = isinstance(before.status, Running | Merging)
        if ended and (entry.failures > before.failures or isinstance(entry.status, Failed)):
            self.commands.append(signals.Discard(self._task(entry.skill)))
        self.draft.put(entry)

    def _announce(self) -> None:
        self.commands.extend(signals.Announce(*move) for move in self.draft.moves)
        self.draft.moves.clear()

    def _task(self, skill: str) -> Task:
        entry = self.draft.entries[skill]
        status = entry.status
        assert isinstance(status, Preparing | Running | Merging)
        budget = self.beat.rules.budget_frames
        merging = isinstance(status, Merging)
        return Task(
            skill=skill,
            expert=self.draft.expert_of(skill),
            attempt=status.attempt,
            run_id=status.run_id,
            device=None if merging else status.device,
            alone=False if merging else status.alone,
            frames_left=None if budget is None else max(0, budget - entry.frames_used),
        )

    def _entries(self, ranks: Iterable[Rank]) -> list[Entry]:
        return [self.draft.entries[skill] for _, _, skill in ranks]

    def _due(self, not_before: datetime | None) -> bool:
        return not_before is None or self.beat.reached(not_before)


def _is_starting(status: Status) -> bool:
    return isinstance(status, Preparing) or (isinstance(status, Running) and status.handle is None)


HEARS: dict[type, Callable[[Turn, Any], None]] = {
    signals.SkillsAdded: Turn.added,
    signals.ExpertWanted: Turn.expert_wanted,
    signals.RunPrepared: Turn.prepared,
    signals.PrepareRefused: Turn.prepare_refused,
    signals.RunLaunched: Turn.launched,
    signals.LaunchRefused: Turn.launch_refused,
    signals.PutOff: Turn.put_off,
    signals.RunEnded: Turn.ended,
    signals.RunHung: Turn.hung,
    signals.RunOverdue: Turn.overdue,
    signals.MergeDone: Turn.merged,
    signals.FoundMerged: Turn.found_merged,
    signals.MergeRefused: Turn.merge_refused,
    signals.Retry: Turn.retry,
    signals.Hold: Turn.hold,
    Request: wishes.obey,
    signals.Stopped: Turn.stopped,
    signals.Restarted: Turn.restarted,
}
