"""The scheduler's step, a pure function: no clock, no randomness, no I/O.

    state, commands = step(state, received, now, schedule)

Every history of events can be replayed; `scheduler` saves each state before it carries out the
commands that came with it, and reports their results as events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from operator import itemgetter
from types import MappingProxyType
from typing import Any

from flowrl.config import ScheduleConfig
from flowrl.parallel import events, outcomes
from flowrl.parallel.events import (
    DONE,
    REFUSED,
    Command,
    ControlRequest,
    Event,
    Response,
    RunEvent,
    RunRequest,
    StopMode,
    Verb,
    why_not,
)
from flowrl.parallel.outcomes import StepContext
from flowrl.parallel.state import SchedulerState, Slots, StateBuilder, active_entries, ready_entries
from flowrl.parallel.status import (
    CANCELLED,
    PAUSED,
    Active,
    Blocked,
    Completed,
    Entry,
    Failed,
    Held,
    Merging,
    Preparing,
    Running,
    Slotted,
    Status,
    StopReason,
    Waiting,
)

_MOST_RESPONSES = 100  # kept; more than the requests that are ever taken at once
NO_DEVICES: Mapping[str, int] = MappingProxyType({})
_UNCHARGED: Mapping[str, Any] = MappingProxyType(
    {"failures": 0, "frames_used": 0, "refusals": 0, "requeues": 0}
    | {"error_at": None, "stuck_at": None}
)


def step(
    state: SchedulerState,
    received: Iterable[Event],
    now: datetime,
    schedule: ScheduleConfig,
    *,
    devices: Mapping[str, int] = NO_DEVICES,
    launching: bool = True,
) -> tuple[SchedulerState, tuple[Command, ...]]:
    """Return the state after the received events, and the commands that follow from it.

    Skills whose needs are completed start in order of priority, then of insertion, as long as slots
    are free: `devices` gives the number of runs that each device takes, and without devices only
    `max_parallel_skills` limits them. With `launching=False` no skill starts.

    GraphError or NameRefusedError means that a skill cannot be added; `state` still holds.
    """
    context = StepContext(now=now, schedule=schedule, devices=devices)
    transition = Transition(state, context)
    for event in received:
        HANDLERS[type(event)](transition, event)
    transition.start_due(launching=launching)
    return transition.builder.build(), tuple(transition.commands)


class Transition:
    """The builder of the next state, the step's context, and the commands ordered so far.

    An event that no longer fits its skill's status (of another run, or received twice) is ignored.
    """

    def __init__(self, state: SchedulerState, context: StepContext) -> None:
        self.commands: list[Command] = []
        least = context.schedule.needs_success_rate
        self.builder = StateBuilder(state, self.commands, needs_success_rate=least)
        self._context = context

    def start_due(self, *, launching: bool) -> None:
        """Order the merges whose time has come, and give free slots to ready skills."""
        active = active_entries(self.builder.entries)
        near = False  # a merge that is under way may make skills ready that rank first
        for entry in active:
            status = entry.status
            due = status.not_before if isinstance(status, Merging) else None
            if due and self._context.reached(due):
                self._set_status(entry, replace(status, not_before=None, why=""))
                self.commands.append(events.Merge(self._request(entry.skill)))
                due = None
            near = near or (isinstance(status, Merging) and due is None)
        if launching and not near and self.builder.stop_mode is StopMode.NONE:
            self._fill_slots(active)

    def _fill_slots(self, active: Sequence[Entry]) -> None:
        """Start ready skills; for those that find no slot, ask long runs to give theirs."""
        context, without = self._context, 0
        slots = Slots(context.schedule, context.devices, active)
        if slots.full and not self._context.schedule.slot_minutes:
            return
        for entry in ready_entries(self.builder.entries):
            status = entry.status
            assert isinstance(status, Waiting)
            if not self._context.reached(status.not_before):
                continue
            overtakes = without and status.queued_at
            devices = None if overtakes else slots.take(alone=status.alone)
            if devices is None:
                without += 1
            else:
                self._start(entry, status, devices)
        if self._context.schedule.slot_minutes:
            self._free_slots(active, without)

    def _free_slots(self, active: Iterable[Entry], count: int) -> None:
        """Ask as many runs to end as skills wait, those that have trained longest first.

        A run that has made no update since its launch has nothing to save, or hangs. Runs that end
        for another reason count, too.
        """
        before = self._context.now - timedelta(minutes=self._context.schedule.slot_minutes)
        runs = [(entry, entry.status) for entry in active if isinstance(entry.status, Running)]
        ending = sum(bool(status.stop_reason) for _, status in runs)
        held = [
            (since, entry)
            for entry, status in runs
            for since in [status.trains_since]
            if since and since <= before and not status.stop_reason
        ]
        for _, entry in sorted(held, key=itemgetter(0))[: max(0, count - ending)]:
            self._ask_to_end(entry, StopReason.YIELD)

    def _start(self, entry: Entry, status: Waiting, devices: tuple[str, ...]) -> None:
        preparing = Preparing(
            attempt=status.attempt,
            devices=devices,
            since=self._context.now,
            run_id=status.run_id,
            alone=status.alone,
        )
        self._set_status(replace(entry, expert=self.builder.expert_of(entry.skill)), preparing)
        self.commands.append(events.Prepare(self._request(entry.skill)))

    # Changes of the graph and of the daemon

    def _add_skills(self, event: events.SkillsAdded) -> None:
        """Add the skills; commands of those that are already under way are ordered again."""
        self.builder.add(event.skills)
        for item in event.skills:
            if isinstance(item.status, Active):
                self._order_again(self.builder.entries[item.skill])

    def _restart(self, _event: events.Restarted) -> None:
        """Order again what the last daemon may not have carried out; all of it is idempotent.

        The least success rate of needs may be another than before.
        """
        for entry in tuple(self.builder.entries.values()):
            if isinstance(entry.status, Completed):
                self.builder.block_dependants(entry.skill)
        for entry in active_entries(self.builder.entries):
            self._order_again(entry)

    def _order_again(self, entry: Entry) -> None:
        request = self._request(entry.skill)
        match entry.status:
            case Preparing():
                self.commands.append(events.Prepare(request))
            case Running(handle=None):
                self.commands.append(events.Launch(request, seek=True))
            case Running(stop_reason=reason) if reason:
                self.commands.append(events.StopRun(request))
            case Merging(not_before=None):
                self.commands.append(events.Merge(request))

    def _end_stop(self, _event: events.Stopped) -> None:
        self.builder.stop_mode = StopMode.NONE

    # What became of commands and runs

    def _prepared(self, event: events.RunPrepared) -> None:
        """Record that the run will be launched, then order its launch."""
        entry = self.builder.entries[event.skill]
        status = entry.status
        if not isinstance(status, Preparing):
            return
        running = Running(
            run_id=event.run_id,
            attempt=status.attempt,
            handle=None,
            devices=status.devices,
            since=self._context.now,
            alone=status.alone,
        )
        self._set_status(entry, running)
        self.commands.append(events.Launch(self._request(event.skill)))

    def _prepare_refused(self, event: events.PrepareRefused) -> None:
        """Fail the skill: another attempt would be refused, too."""
        entry = self.builder.entries[event.skill]
        if isinstance(entry.status, Preparing):
            failed = Failed(why=event.why, attempt=entry.status.attempt, at=self._context.now)
            self._set_status(entry, failed)

    def _launched(self, event: events.RunLaunched) -> None:
        if entry := self._entry_of(event, Running):
            assert isinstance(entry.status, Running)
            self._set_status(replace(entry, refusals=0), replace(entry.status, handle=event.handle))

    def _launch_refused(self, event: events.LaunchRefused) -> None:
        entry = self.builder.entries[event.skill]
        if _is_starting(entry.status):
            self._put(outcomes.refused(entry, event.why, self._context))

    def _deferred(self, event: events.Deferred) -> None:
        entry = self.builder.entries[event.skill]
        if _is_starting(entry.status) or isinstance(entry.status, Merging):
            self._put(outcomes.deferred(entry, event.why, self._context))

    def _ended(self, event: events.RunEnded) -> None:
        """Merge the run, let it go on, hold it, or charge the attempt."""
        if entry := self._entry_of(event, Running):
            self._put(outcomes.after_end(entry, event, self._context))
            if isinstance(self.builder.entries[event.skill].status, Merging):
                self.commands.append(events.Merge(self._request(event.skill)))

    def _trains(self, event: events.RunTrains) -> None:
        entry = self._entry_of(event, Running)
        if entry and isinstance(entry.status, Running):
            self._set_status(entry, replace(entry.status, trains_since=self._context.now))

    def _late(self, event: events.RunLate) -> None:
        """Ask a silent or slow run to end, unless a user has already asked it to."""
        entry = self._entry_of(event, Running)
        if entry and isinstance(entry.status, Running) and not entry.status.stop_reason:
            self._ask_to_end(entry, event.reason)

    def _merged(self, event: events.MergeDone) -> None:
        if entry := self._entry_of(event, Merging):
            self._put(outcomes.completed(entry, event, self._context))

    def _merge_refused(self, event: events.MergeRefused) -> None:
        """A result that cannot be merged is an attempt that failed."""
        if entry := self._entry_of(event, Merging):
            assert isinstance(entry.status, Merging)
            self._put(outcomes.charged(entry, event.why, entry.status.frames, self._context))

    # What a user asks

    def _handle_request(self, request: ControlRequest) -> None:
        """Handle a request, unless it has a response, and record the response."""
        if any(response.id == request.id for response in self.builder.responses):
            return
        refusal = request.refusal or self._handle_verb(request)
        response = Response(
            id=request.id,
            verb=request.verb.value if request.verb else "",
            skill=request.skill,
            at=self._context.now,
            outcome=f"{REFUSED}{refusal}" if refusal else DONE,
        )
        self.builder.responses = (*self.builder.responses, response)[-_MOST_RESPONSES:]

    def _handle_verb(self, request: ControlRequest) -> str:
        """Change the state as a request says; return why it is refused, or an empty string."""
        match request.verb:
            case None:
                return "it cannot be understood"
            case Verb.STOP | Verb.STOP_NOW:
                if self.builder.stop_mode is not StopMode.STOP_NOW:
                    self.builder.stop_mode = StopMode(request.verb.value)
                return ""
            case Verb.ADD:  # the scheduler adds skills before it hands their requests on
                return "" if request.skill else "add is for one skill; name it"
            case verb if request.skill is None:
                return self._handle_for_all(verb)
            case verb:
                return self._handle_for_one(request, verb, request.skill)

    def _handle_for_one(self, request: ControlRequest, verb: Verb, skill: str) -> str:
        if skill not in self.builder.entries:
            return "there is no such skill"
        entry = self.builder.entries[skill]
        if refusal := why_not(verb, entry.status.kind):
            return refusal
        if verb is Verb.RESUME and not _is_paused(entry.status):
            return "it is running, and nobody asked it to pause"
        if verb is Verb.PAUSE and _ends_for_good(entry.status):
            return "it was asked to end for good"
        self._change(events.Asked(skill, verb, request.number))
        return ""

    def _handle_for_all(self, verb: Verb) -> str:
        """Pause or resume every skill that it fits; `resume` takes back a stop as well."""
        if verb not in (Verb.PAUSE, Verb.RESUME):
            return f"{verb.value} is for one skill; name it"
        if verb is Verb.RESUME:
            self.builder.stop_mode = StopMode.NONE
        for skill in tuple(self.builder.entries):
            entry = self.builder.entries[skill]  # an earlier one may have unblocked it
            if why_not(verb, entry.status.kind):
                continue
            if verb is Verb.PAUSE or _is_paused(entry.status, PAUSED):
                self._change(events.Asked(skill, verb))
        return ""

    def _change(self, asked: events.Asked) -> None:
        """Change a skill as is asked, if its status admits that."""
        entry = self.builder.entries[asked.skill]
        match asked.verb:
            case Verb.RETRY:
                self._retry(entry)
            case Verb.TRAIN_MORE | Verb.RETRAIN:
                self._train_more(entry, asked)
            case Verb.PAUSE:
                self._pause(entry, asked.why)
            case Verb.RESUME:
                self._resume(entry)
            case Verb.CANCEL:
                self._cancel(entry)
            case Verb.PRUNE:
                self._ask_to_end(entry, StopReason.PRUNE)
            case Verb.PRIORITY:
                self.builder.put(replace(entry, priority=asked.number))

    def _retry(self, entry: Entry) -> None:
        """Reset the counts: a failed skill gets a new attempt, a held run goes on."""
        match entry.status:
            case Failed(attempt=attempt):
                waiting = Waiting(attempt=attempt + 1)
            case Held(attempt=attempt, run_id=run_id):
                waiting = Waiting(attempt=attempt, run_id=run_id)
            case Waiting() as status:
                waiting = replace(status, not_before=None)
            case _:
                return
        self._set_status(replace(entry, **_UNCHARGED), waiting)

    def _train_more(self, entry: Entry, asked: events.Asked) -> None:
        """Let another run of a completed skill start, from its own expert or anew."""
        if isinstance(done := entry.status, Completed):
            goal, budget = max(done.goal, asked.goal), max(done.budget, asked.budget)
            used = entry.frames_used if done.early else 0
            again = replace(
                replace(entry, **_UNCHARGED),
                status=Waiting(attempt=done.attempt + 1),
                trained=replace(done, goal=goal, budget=budget),
                more_frames=max(0, asked.number),
                anew=asked.verb is Verb.RETRAIN,
                frames_used=used,
            )
            self._put(again)

    def _pause(self, entry: Entry, why: str) -> None:
        """Hold a skill; a running one is asked to end first, a merging one is completed anyway."""
        status = entry.status
        if isinstance(status, Running):
            self._ask_to_end(entry, StopReason.PAUSE)
        elif isinstance(status, Waiting | Preparing | Blocked):
            ended = {"attempt": status.attempt, "run_id": status.run_id}
            self._set_status(entry, Held(why=why, at=self._context.now, **ended))

    def _resume(self, entry: Entry) -> None:
        """Let a held skill go on with its run; one that is just ending goes on afterwards."""
        status = entry.status
        if isinstance(status, Held):
            self._set_status(entry, Waiting(attempt=status.attempt, run_id=status.run_id))
        elif isinstance(status, Running) and status.stop_reason is StopReason.PAUSE:
            self._set_status(entry, replace(status, stop_reason=StopReason.NONE))

    def _cancel(self, entry: Entry) -> None:
        """Fail a skill and discard its run, unless that has finished by now."""
        if isinstance(entry.status, Running):
            self._ask_to_end(entry, StopReason.CANCEL)
            return
        if entry.status.run_id is not None:
            self.commands.append(events.Discard(self._request(entry.skill)))
        attempt = entry.status.attempt
        self._set_status(entry, Failed(why=CANCELLED, attempt=attempt, at=self._context.now))

    # The steps that all of these share

    def _entry_of(self, event: RunEvent, kind: type[Status]) -> Entry | None:
        """The entry that the event is about, if it is in that status with that very run."""
        entry = self.builder.entries[event.skill]
        of_run = entry.status.run_id == event.run_id
        return entry if of_run and isinstance(entry.status, kind) else None

    def _ask_to_end(self, entry: Entry, reason: StopReason) -> None:
        """Ask a run to end; one that ends for good can only be cancelled."""
        status = entry.status
        if _ends_for_good(status) and reason is not StopReason.CANCEL:
            return
        if isinstance(status, Running) and status.stop_reason != reason:
            self._set_status(entry, replace(status, stop_reason=reason))
            self.commands.append(events.StopRun(self._request(entry.skill)))

    def _set_status(self, entry: Entry, status: Status) -> None:
        """Write the entry with another status."""
        self._put(replace(entry, status=status))

    def _put(self, entry: Entry) -> None:
        """Write the entry; the folder of a run that ended and does not go on is discarded."""
        ended = isinstance(self.builder.entries[entry.skill].status, Running | Merging)
        status = entry.status
        anew = isinstance(status, Waiting) and status.run_id is None
        if ended and (anew or isinstance(status, Failed)):
            self.commands.append(events.Discard(self._request(entry.skill)))
        if entry.trained and isinstance(status, Failed):
            entry = outcomes.as_before(entry, status.why)
        self.builder.put(entry)

    def _request(self, skill: str) -> RunRequest:
        entry, budget = self.builder.entries[skill], self._context.schedule.skill_timesteps_budget
        status, goes_on = entry.status, entry.trained and entry.trained.early
        goes_on = goes_on and not (entry.more_frames or entry.anew)
        return RunRequest(
            skill=skill,
            expert=self.builder.expert_of(skill),
            attempt=status.attempt,
            run_id=status.run_id,
            devices=status.devices if isinstance(status, Slotted) else (),
            alone=isinstance(status, Waiting | Slotted) and status.alone,
            frames_left=None if budget is None else max(0, budget - entry.frames_used),
            more_frames=entry.more_frames,
            spent=entry.trained.frames if entry.trained and goes_on else 0,
            anew=entry.anew,
        )


def _is_starting(status: Status) -> bool:
    return isinstance(status, Preparing) or (isinstance(status, Running) and status.handle is None)


def _ends_for_good(status: Status) -> bool:
    final = (StopReason.CANCEL, StopReason.PRUNE)
    return isinstance(status, Running) and status.stop_reason in final


def _is_paused(status: Status, why: str | None = None) -> bool:
    if isinstance(status, Held):
        return why in (None, status.why)
    return isinstance(status, Running) and status.stop_reason is StopReason.PAUSE


HANDLERS: dict[type, Callable[[Transition, Any], None]] = {
    events.SkillsAdded: Transition._add_skills,
    events.RunPrepared: Transition._prepared,
    events.PrepareRefused: Transition._prepare_refused,
    events.RunLaunched: Transition._launched,
    events.LaunchRefused: Transition._launch_refused,
    events.Deferred: Transition._deferred,
    events.RunTrains: Transition._trains,
    events.RunEnded: Transition._ended,
    events.RunLate: Transition._late,
    events.MergeDone: Transition._merged,
    events.MergeRefused: Transition._merge_refused,
    events.Asked: Transition._change,
    ControlRequest: Transition._handle_request,
    events.Stopped: Transition._end_stop,
    events.Restarted: Transition._restart,
}
