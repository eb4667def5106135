"""What becomes of an entry when its run ends or cannot start: pure functions of the cause."""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import assert_never

from flowrl.launchers.job import Exited, Finished, Lost, Why
from flowrl.parallel.asks import PAUSED
from flowrl.parallel.signals import FoundMerged, LastWords, Rules, RunEnded
from flowrl.parallel.status import (
    Asked,
    Completed,
    Entry,
    Failed,
    Held,
    Merging,
    Preparing,
    Running,
    Waiting,
)

_REQUEUED = (Why.STOPPED, Why.SERVER_KILLED)  # nobody's fault: goes on where it was
_MEANT = (Why.SESSION_KILLED, Why.INTERRUPTED)  # a user did it in the terminal
_OWN_SIGNALS = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
_SILENT = LastWords()
_SHOWN = 300  # characters of the log's last line
CANCELLED = "cancelled on request"
_MOST_PUT_OFF_DOUBLINGS = 4  # a disk that has room again should not wait for ten minutes


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """When a step happens and by which rules; `jitter` lengthens every wait by that share."""

    now: datetime
    rules: Rules
    jitter: float = 0.0

    def later(self, tries: int) -> datetime:
        """When to try again after so many tries."""
        return self.now + self.rules.backoff(tries, self.jitter)

    def reached(self, not_before: datetime) -> bool:
        """Whether a wait is over; one longer than any can be is of a clock that was set back."""
        longest = timedelta(seconds=2 * self.rules.backoff_cap_seconds)
        return not_before <= self.now or not_before - self.now > longest


def after_end(entry: Entry, event: RunEnded, beat: Beat) -> Entry:
    """The entry whose run ended like this; one that has finished after all is merged."""
    status = entry.status
    assert isinstance(status, Running)
    if isinstance(event.outcome, Finished):
        return _finished(entry, status, event.outcome, beat)
    match status.asked:
        case Asked.HUNG:
            return charged(entry, "it showed no progress for too long", event.frames, beat)
        case Asked.OVERDUE:
            return charged(entry, "it took longer than --run_timeout", event.frames, beat)
        case Asked.HOLD:
            return _held(entry, status, PAUSED, beat)
        case Asked.CANCEL:
            failed = Failed(why=CANCELLED, attempt=status.attempt, at=beat.now)
            return replace(entry, status=failed)
        case Asked.NOTHING:
            return _by_cause(entry, event.outcome, event, beat)
        case _:
            assert_never(status.asked)


def charged(
    entry: Entry, why: str, frames: int, beat: Beat, *, oom: bool = False, said: LastWords = _SILENT
) -> Entry:
    """The attempt counts: another one after a while, or none when they are used up.

    The very error of the attempt before would come a third time, so it ends the retries.
    """
    status = entry.status
    assert isinstance(status, Preparing | Running | Merging)
    again = bool(said.error) and said.error == entry.error
    entry = replace(
        entry,
        failures=entry.failures + 1,
        frames_used=entry.frames_used + frames,
        refusals=0,
        requeues=0,
        error=said.error,
    )
    given_up = "the same error twice" if again else _given_up(entry, beat.rules)
    if given_up:
        text = f"{why}; {given_up}"
        failed = Failed(why=text, attempt=status.attempt, at=beat.now, log=said.lines)
        return replace(entry, status=failed)
    waiting = Waiting(
        attempt=status.attempt + 1,
        not_before=beat.later(entry.failures),
        why=why,
        alone=oom,
    )
    return replace(entry, status=waiting)


def refused(entry: Entry, why: str, beat: Beat) -> Entry:
    """It could not start: again after a while without a charge, but not for ever."""
    if entry.refusals >= beat.rules.max_refusals:
        return charged(entry, why, 0, beat)
    tries = entry.refusals + 1
    return _waiting_again(replace(entry, refusals=tries), why, beat.later(tries))


def put_off(entry: Entry, why: str, beat: Beat) -> Entry:
    """It lacks room or a lock: again after a while, as often as it takes."""
    status = entry.status
    if not isinstance(status, Merging):
        return _waiting_again(entry, why, beat.later(1))
    tries = min(entry.refusals + 1, _MOST_PUT_OFF_DOUBLINGS)
    merging = replace(status, not_before=beat.later(tries), why=why)
    return replace(entry, refusals=tries, status=merging)


def completed(entry: Entry, told: Merging | FoundMerged, beat: Beat) -> Entry:
    """The entry whose expert is in the global checkpoint; `told` says what the run did."""
    status = entry.status
    assert isinstance(status, Running | Merging)
    done = Completed(
        run_id=status.run_id,
        attempt=status.attempt,
        frames=told.frames,
        success_rate=told.success_rate,
        wall_seconds=told.wall_seconds,
        at=beat.now,
    )
    return replace(entry, refusals=0, requeues=0, status=done)


def described(outcome: Exited | Lost) -> str:
    """How a run ended, in a few words for people."""
    match outcome:
        case Lost(detail):
            return f"it left no trace of how it ended ({detail})" if detail else "it left no trace"
        case Exited(why=why, code=code, signal=signal, detail=detail):
            number = f" {code}" if why is Why.EXIT else f" {signal}" if why is Why.SIGNAL else ""
            word = f"{why.value.replace('_', ' ')}{number}"
            return f"{word} ({detail})" if detail else word
        case _:
            assert_never(outcome)


def _finished(entry: Entry, status: Running, outcome: Finished, beat: Beat) -> Entry:
    result = outcome.result
    least = beat.rules.min_success_rate
    if result.success_rate < least:
        why = f"succeeded in {result.success_rate:.1%} of the episodes, under {least:.1%}"
        return charged(entry, why, result.frames, beat)
    merging = Merging(
        run_id=status.run_id,
        attempt=status.attempt,
        frames=result.frames,
        success_rate=result.success_rate,
        wall_seconds=result.wall_seconds,
        since=beat.now,
    )
    return replace(entry, refusals=0, requeues=0, status=merging)


def _by_cause(entry: Entry, outcome: Exited | Lost, event: RunEnded, beat: Beat) -> Entry:
    status = entry.status
    assert isinstance(status, Running)
    why = described(outcome)
    cause = outcome.why if isinstance(outcome, Exited) else None
    if cause in _MEANT:
        return _held(entry, status, why, beat)
    if cause in _REQUEUED:
        return _requeued(entry, status, why, beat)
    said = event.said if _is_own_error(outcome) else replace(event.said, error="")
    last = said.lines[-1][:_SHOWN] if said.lines else ""
    why = f"{why}: {last}" if last and cause is not Why.OOM else why
    return charged(entry, why, event.frames, beat, oom=cause is Why.OOM, said=said)


def _is_own_error(outcome: Exited | Lost) -> bool:
    """Whether the trainer ended by itself: what killed it from outside may not come again."""
    match outcome:
        case Exited(why=Why.EXIT | Why.NO_RESULT):
            return True
        case Exited(why=Why.SIGNAL, signal=number):
            return number in _OWN_SIGNALS
        case _:
            return False


def _requeued(entry: Entry, status: Running, why: str, beat: Beat) -> Entry:
    """The same attempt goes on: at once, unless that has just been tried."""
    lived_seconds = (beat.now - status.since).total_seconds()
    tries = 0 if lived_seconds > beat.rules.backoff_cap_seconds else entry.requeues
    entry = replace(entry, requeues=tries + 1)
    return _waiting_again(entry, why, beat.later(tries) if tries else None)


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


def _held(entry: Entry, status: Running, why: str, beat: Beat) -> Entry:
    held = Held(why=why, attempt=status.attempt, at=beat.now, run_id=status.run_id)
    return replace(entry, status=held)


def _given_up(entry: Entry, rules: Rules) -> str:
    """Why there is no further attempt, or nothing."""
    if entry.failures > rules.max_retries:
        return f"attempt {entry.failures} of {rules.max_retries + 1}"
    if rules.budget_frames is not None and entry.frames_used >= rules.budget_frames:
        return f"its budget of {rules.budget_frames} frames is spent"
    return ""
