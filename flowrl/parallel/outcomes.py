"""The entry after its run has ended or could not start: pure functions of the cause."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import assert_never

from flowrl.config import ScheduleConfig
from flowrl.errors import EXIT_DISK_FULL, EXIT_DIVERGED, EXIT_IO, EXIT_RESUMABLE, EXIT_USAGE
from flowrl.launchers.base import ExitCause, Exited, Lost
from flowrl.parallel.events import MergeDone, RunEnded
from flowrl.parallel.status import (
    CANCELLED,
    PAUSED,
    Completed,
    Entry,
    Failed,
    Held,
    Merging,
    Preparing,
    Running,
    StopReason,
    Waiting,
)
from flowrl.rates import is_clearly_more
from flowrl.runs import REPORT, RunResult

_RESUMED = (ExitCause.STOPPED, ExitCause.SERVER_KILLED)  # by no fault of the skill: the run goes on
_DELIBERATE = (ExitCause.SESSION_KILLED, ExitCause.INTERRUPTED)  # a user ended it in the terminal
_ASKED = (StopReason.PAUSE, StopReason.CANCEL)
_YIELDED = "it gave its slot to skills that waited"
BACKOFF_CAP_SECONDS = 600.0
_LEAST_BACKOFF_SECONDS = 0.1  # without a wait, a tick would try again for ever
MAX_REQUEUES = 20  # ends by errors of the disk in a row, some hours, until one is charged
_MAX_REFUSALS = 5  # launches that may be refused in a row before an attempt is charged
_MOST_DEFERRED_DOUBLINGS = 4  # work goes on soon after a full disk has room again


@dataclass(frozen=True, slots=True, kw_only=True)
class StepContext:
    """The time of a step, and its configuration."""

    now: datetime
    schedule: ScheduleConfig
    devices: Mapping[str, int]  # how many runs each device takes

    def later(self, tries: int) -> datetime:
        """Return when to try again after so many tries."""
        doubled = self.schedule.retry_backoff * 2.0 ** min(tries - 1, 60)
        seconds = min(max(doubled, _LEAST_BACKOFF_SECONDS), BACKOFF_CAP_SECONDS)
        return self.now + timedelta(seconds=seconds)

    def reached(self, not_before: datetime | None) -> bool:
        """Return whether a wait is over; one beyond the longest means a clock that was set back."""
        longest = timedelta(seconds=2 * BACKOFF_CAP_SECONDS)
        return not_before is None or not_before <= self.now or not_before - self.now > longest


def after_end(entry: Entry, event: RunEnded, context: StepContext) -> Entry:
    """Return the entry whose run ended like this; one that has finished after all is merged."""
    status = entry.status
    assert isinstance(status, Running)
    if isinstance(event.outcome, RunResult):
        return _finished(entry, status, event.outcome, context)
    match status.stop_reason:
        case StopReason.HUNG:
            why = "it showed no progress for too long"
        case StopReason.OVERDUE:
            why = "it took longer than --run_timeout"
        case StopReason.PAUSE | StopReason.CANCEL:
            return _as_asked(entry, status, context)
        case StopReason.PRUNE:
            why = f"it was to end with what it had, and left no result: {described(event.outcome)}"
        case StopReason.NONE | StopReason.YIELD:
            return _by_cause(entry, event.outcome, event, context)
        case _:
            assert_never(status.stop_reason)
    return charged(entry, why, event.frames, context, goes_on=bool(event.saved))


def charged(
    entry: Entry,
    why: str,
    frames: int,
    context: StepContext,
    *,
    goes_on: bool = False,
    log: tuple[str, ...] = (),
) -> Entry:
    """Charge the attempt: another one follows after a while, or none when they are used up.

    If it `goes_on`, the next attempt continues the same run from its newest checkpoint, and the
    run's frames are counted at its own end. Else a new run begins, with another seed.
    """
    status = entry.status
    assert isinstance(status, Preparing | Running | Merging)
    entry = replace(entry, failures=entry.failures + 1, refusals=0, requeues=0)
    used = replace(entry, frames_used=entry.frames_used + frames)
    if given_up := _given_up(entry if goes_on else used, context.schedule):
        return _failed(used, f"{why}; {given_up}", context, log)
    waiting = Waiting(
        attempt=status.attempt + 1,
        not_before=context.later(entry.failures),
        why=why,
        run_id=status.run_id if goes_on else None,
    )
    return replace(entry if goes_on else used, status=waiting)


def refused(entry: Entry, why: str, context: StepContext) -> Entry:
    """Return the entry whose run could not start: it is tried again uncharged, but not for ever."""
    if isinstance(entry.status, Running) and entry.status.stop_reason in _ASKED:
        return _as_asked(entry, entry.status, context)
    if entry.refusals >= _MAX_REFUSALS:
        goes_on = entry.status.run_id is not None
        return charged(entry, why, 0, context, goes_on=goes_on)
    tries = entry.refusals + 1
    return _waiting_again(replace(entry, refusals=tries), why, context.later(tries))


def deferred(entry: Entry, why: str, context: StepContext) -> Entry:
    """Return the entry that lacks disk space or a lock: it is tried again as often as it takes."""
    status = entry.status
    if isinstance(status, Running) and status.stop_reason in _ASKED:
        return _as_asked(entry, status, context)
    if not isinstance(status, Merging):
        return _waiting_again(entry, why, context.later(1))
    tries = min(entry.refusals + 1, _MOST_DEFERRED_DOUBLINGS)
    merging = replace(status, not_before=context.later(tries), why=why)
    return replace(entry, refusals=tries, status=merging)


def completed(entry: Entry, event: MergeDone, context: StepContext) -> Entry:
    """Return the entry whose expert is in the global checkpoint, with the figures of its run."""
    status, before = entry.status, entry.trained
    assert isinstance(status, Merging)
    if before and not event.taken:
        return as_before(entry, "the copy of its expert that another run trained counts")
    done = Completed(
        run_id=status.run_id,
        attempt=status.attempt,
        frames=status.frames,
        success_rate=status.success_rate,
        wall_seconds=status.wall_seconds,
        at=context.now,
        goal=event.goal,
        budget=max(event.budget, before.budget if before else 0),
        early=event.early,
    )
    return replace(_as_ended(entry), refusals=0, requeues=0, status=done)


def as_before(entry: Entry, why: str) -> Entry:
    """Return the entry of a skill that was trained on without effect: completed, as it was."""
    assert entry.trained is not None
    how = "anew" if entry.anew else "on"
    done = replace(entry.trained, why=f"training {how} has changed nothing: {why}")
    return replace(_as_ended(entry), status=done)


def _as_ended(entry: Entry) -> Entry:
    return replace(entry, trained=None, more_frames=0, anew=False)


def described(outcome: Exited | Lost) -> str:
    """Return how a run ended, in a few words for people."""
    match outcome:
        case Lost(detail):
            return f"it left no trace of how it ended ({detail})" if detail else "it left no trace"
        case Exited(cause=cause, code=code, signal=signal, detail=detail):
            number = {ExitCause.EXIT: f" {code}", ExitCause.SIGNAL: f" {signal}"}.get(cause, "")
            word = f"{cause.value.replace('_', ' ')}{number}"
            if detail and cause in (*_RESUMED, *_DELIBERATE):
                return detail  # it repeats the word
            return word if detail in ("", f"exit code {code}") else f"{word} ({detail})"
        case _:
            assert_never(outcome)


def _finished(entry: Entry, status: Running, result: RunResult, context: StepContext) -> Entry:
    least, before = context.schedule.min_success_rate, entry.trained
    if before and not entry.anew and is_clearly_more(before.success_rate, result.success_rate):
        why = f"success was {before.success_rate:.1%} before and {result.success_rate:.1%} then"
        return _failed(entry, why, context)
    if result.success_rate < least:
        why = f"succeeded in {result.success_rate:.1%} of the episodes, under {least:.1%}"
        tried = charged(entry, why, result.frames, context)
        return _unless_in_vain(tried, result, context) if result.stopped == "converged" else tried
    merging = Merging(
        run_id=status.run_id,
        attempt=status.attempt,
        frames=result.frames,
        success_rate=result.success_rate,
        wall_seconds=result.wall_seconds,
        since=context.now,
    )
    return replace(entry, refusals=0, requeues=0, status=merging)


def _unless_in_vain(entry: Entry, result: RunResult, context: StepContext) -> Entry:
    """Fail a skill whose attempt got stuck (`--stop_when_stuck`) no higher than the last one."""
    status, highest = entry.status, entry.stuck_at
    if highest is None or result.success_rate > highest or not isinstance(status, Waiting):
        return replace(entry, stuck_at=result.success_rate)
    why = f"{status.why}; it got stuck no higher than an attempt before"
    return replace(entry, status=Failed(why=why, attempt=status.attempt - 1, at=context.now))


def _by_cause(entry: Entry, outcome: Exited | Lost, event: RunEnded, context: StepContext) -> Entry:
    status = entry.status
    assert isinstance(status, Running)
    why = described(outcome)
    cause = outcome.cause if isinstance(outcome, Exited) else None
    if cause in _DELIBERATE:
        return _held(entry, status, why, context)
    yields = cause is ExitCause.STOPPED and status.stop_reason is StopReason.YIELD
    own = cause is ExitCause.EXIT or yields  # what yields without saving ends by its own fault
    code = outcome.code if isinstance(outcome, Exited) and own else None
    lived_seconds = (context.now - status.since).total_seconds()
    tries = 0 if lived_seconds > BACKOFF_CAP_SECONDS else entry.requeues
    if yields and code == EXIT_RESUMABLE:
        entry = _waiting_again(entry, _YIELDED, None)
        return replace(entry, status=replace(entry.status, queued_at=context.now))
    if cause in _RESUMED and not yields:
        return _requeued(entry, why, context, tries=tries)
    last = event.log[-1] if event.log and REPORT not in event.log[-1] else ""
    why = f"{why}: {last}" if last and cause is not ExitCause.OOM else why
    if code == EXIT_DISK_FULL or event.full_disk:
        return _requeued(entry, why, context, tries=tries)
    if code == EXIT_IO and entry.requeues < MAX_REQUEUES:
        return _requeued(entry, why, context, tries=entry.requeues)
    if code == EXIT_USAGE:
        return _failed(replace(entry, failures=entry.failures + 1), why, context, event.log)
    again = code is not None and event.saved == entry.error_at
    anew = again or code == EXIT_DIVERGED or cause is ExitCause.NO_RESULT
    goes_on = bool(event.saved) and not anew
    entry = replace(entry, error_at=event.saved if goes_on and code is not None else None)
    entry = charged(entry, why, event.frames, context, goes_on=goes_on, log=event.log)
    if cause is ExitCause.OOM and isinstance(entry.status, Waiting):
        entry = replace(entry, status=replace(entry.status, alone=True))
    return entry


def _requeued(entry: Entry, why: str, context: StepContext, *, tries: int) -> Entry:
    """The same attempt goes on, at once at the first time."""
    entry = replace(entry, requeues=tries + 1)
    return _waiting_again(entry, why, context.later(tries) if tries else None)


def _waiting_again(entry: Entry, why: str, not_before: datetime | None) -> Entry:
    status = entry.status
    assert isinstance(status, Preparing | Running)
    waiting = Waiting(
        attempt=status.attempt,
        not_before=not_before,
        why=why,
        run_id=status.run_id,
        alone=status.alone,
    )
    return replace(entry, status=waiting)


def _as_asked(entry: Entry, status: Running, context: StepContext) -> Entry:
    """Return the entry whose run a user has asked to end; it may not even have started."""
    if status.stop_reason is StopReason.CANCEL:
        return _failed(entry, CANCELLED, context)
    return _held(entry, status, PAUSED, context)


def _held(entry: Entry, status: Running, why: str, context: StepContext) -> Entry:
    held = Held(why=why, attempt=status.attempt, at=context.now, run_id=status.run_id)
    return replace(entry, status=held)


def _failed(entry: Entry, why: str, context: StepContext, log: tuple[str, ...] = ()) -> Entry:
    failed = Failed(why=why, attempt=entry.status.attempt, at=context.now, log=log)
    return replace(entry, status=failed)


def _given_up(entry: Entry, schedule: ScheduleConfig) -> str:
    """Return why there is no further attempt, or an empty string."""
    if entry.failures > schedule.max_retries:
        return f"attempt {entry.failures} of {schedule.max_retries + 1}"
    budget = schedule.skill_timesteps_budget
    if budget is not None and entry.frames_used >= budget:
        return f"its budget of {budget} frames is spent"
    return ""
