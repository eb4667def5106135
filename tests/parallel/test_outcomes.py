"""What follows from a run's end, to the second and to the frame."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from flowrl.config import ScheduleConfig
from flowrl.errors import EXIT_DISK_FULL, EXIT_DIVERGED, EXIT_IO, EXIT_RESUMABLE, EXIT_USAGE
from flowrl.launchers.base import ExitCause, Exited, Lost
from flowrl.parallel import outcomes
from flowrl.parallel.events import RunEnded
from flowrl.parallel.outcomes import BACKOFF_CAP_SECONDS, MAX_REQUEUES, StepContext
from flowrl.parallel.status import Entry, Failed, Merging, Running, StopReason, Waiting
from flowrl.runs import REPORT
from tests.parallel.scheduling import finished

NOW = datetime(2030, 1, 1, tzinfo=UTC)
RUNNING = Running(run_id="e0.a1.x", attempt=1, handle=None, since=NOW)
MERGING = Merging(
    run_id="e0.a1.x", attempt=1, frames=8, success_rate=0.5, wall_seconds=1.0, since=NOW
)
ENTRY = Entry(skill="A", status=RUNNING, expert=0)

RESULT = finished("e0.a1.x", success_rate=0.5, frames=8)


def context(**schedule) -> StepContext:
    return StepContext(now=NOW, schedule=ScheduleConfig(retry_backoff=5.0, **schedule), devices={})


def seconds(entry: Entry) -> float:
    assert isinstance(entry.status, Waiting | Merging)
    assert entry.status.not_before is not None
    return (entry.status.not_before - NOW).total_seconds()


def stopped(entry: Entry, now: datetime = NOW) -> Entry:
    event = RunEnded("A", "e0.a1.x", Exited(cause=ExitCause.STOPPED))
    return outcomes.after_end(entry, event, replace(context(), now=now))


def test_waits_double_up_to_the_cap():
    waits = [(context().later(tries) - NOW).total_seconds() for tries in (1, 2, 3, 4, 500)]
    assert waits == [5, 10, 20, 40, BACKOFF_CAP_SECONDS]


@pytest.mark.parametrize(
    ("away", "reached"),
    [(0, True), (1, False), (2 * BACKOFF_CAP_SECONDS, False), (2 * BACKOFF_CAP_SECONDS + 1, True)],
)
def test_a_wait_longer_than_the_longest_is_over(away, reached):
    assert context().reached(NOW + timedelta(seconds=away)) is reached


def test_deferred_merges_wait_longer_each_time_but_not_for_ever():
    entry, waits = replace(ENTRY, status=MERGING), []
    for _ in range(6):
        entry = outcomes.deferred(entry, "the disk is full", context())
        waits.append(seconds(entry))
    assert waits == [5, 10, 20, 40, 40, 40]


def test_a_run_that_was_stopped_goes_on_at_once_and_then_after_growing_waits():
    first = stopped(ENTRY)
    assert (first.requeues, first.status.not_before) == (1, None)
    second = stopped(replace(first, status=RUNNING))
    assert (second.requeues, seconds(second)) == (2, 5)
    assert seconds(stopped(replace(second, status=RUNNING))) == 10


@pytest.mark.parametrize(("lived", "requeues"), [(0, 5), (1, 1)], ids=["the cap", "longer"])
def test_a_run_that_lived_longer_than_the_cap_goes_on_at_once(lived, requeues):
    now = NOW + timedelta(seconds=BACKOFF_CAP_SECONDS + lived)
    assert stopped(replace(ENTRY, requeues=4), now).requeues == requeues


@pytest.mark.parametrize(("frames", "status"), [(9, Waiting), (10, Failed), (11, Failed)])
def test_a_budget_is_spent_from_its_last_frame_on(frames, status):
    entry = outcomes.charged(ENTRY, "it failed", frames, context(skill_timesteps_budget=10))
    assert isinstance(entry.status, status)
    assert entry.status.why.endswith("its budget of 10 frames is spent") is (status is Failed)


def exited(code: int | None = None, cause: ExitCause = ExitCause.EXIT, **facts) -> Exited:
    return Exited(cause=cause, code=code, **facts)


FULL = {"full_disk": True}
REQUEUED = ("waiting", 0, MAX_REQUEUES + 1, True, 0)
HELD = ("held", 0, MAX_REQUEUES, True, 0)
GOES_ON = ("waiting", 1, 0, True, 0)
ANEW = ("waiting", 1, 0, False, 8)
REFUSED = ("failed", 1, MAX_REQUEUES, False, 0)
LINE = ("ValueError: no",)
TOLD = (f"12:00:00 training{REPORT}7 · 57,344 of 1,000,000 frames",)


@pytest.mark.parametrize(
    ("outcome", "facts", "expected", "why"),
    [
        (exited(cause=ExitCause.STOPPED), {}, REQUEUED, "stopped"),
        (exited(cause=ExitCause.SERVER_KILLED), {}, REQUEUED, "server killed"),
        (exited(EXIT_DISK_FULL), {}, REQUEUED, f"exit {EXIT_DISK_FULL}"),
        (exited(EXIT_IO), FULL, REQUEUED, f"exit {EXIT_IO}"),
        (exited(1), FULL, REQUEUED, "exit 1"),
        (exited(cause=ExitCause.SIGNAL, signal=7), FULL, REQUEUED, "signal 7"),
        (Lost("gone"), FULL, REQUEUED, "it left no trace of how it ended (gone)"),
        (exited(cause=ExitCause.SESSION_KILLED), {}, HELD, "session killed"),
        (exited(cause=ExitCause.INTERRUPTED), {}, HELD, "interrupted"),
        (exited(EXIT_IO), {}, GOES_ON, f"exit {EXIT_IO}"),
        (exited(1), {"log": LINE}, GOES_ON, "exit 1: ValueError: no"),
        (exited(cause=ExitCause.SIGNAL, signal=9), {"log": TOLD}, GOES_ON, "signal 9"),
        (exited(EXIT_DIVERGED, ExitCause.OOM), {"log": LINE}, GOES_ON, "oom"),
        (Lost(), {}, GOES_ON, "it left no trace"),
        (exited(1), {"saved": 0}, ANEW, "exit 1"),
        (exited(cause=ExitCause.OOM), {"saved": 0}, ANEW, "oom"),
        (exited(EXIT_DIVERGED), {}, ANEW, f"exit {EXIT_DIVERGED}"),
        (exited(cause=ExitCause.NO_RESULT), {}, ANEW, "no result"),
        (exited(EXIT_USAGE), {}, REFUSED, f"exit {EXIT_USAGE}"),
        (exited(EXIT_USAGE), {"saved": 0}, REFUSED, f"exit {EXIT_USAGE}"),
    ],
)
def test_each_cause_of_an_end_has_its_consequence(outcome, facts, expected, why):
    """After so many requeues in a row that one more error of the disk itself is charged."""
    event = RunEnded("A", "e0.a1.x", outcome, 8, **{"saved": 1, **facts})
    before = replace(ENTRY, requeues=MAX_REQUEUES)
    entry = outcomes.after_end(before, event, context())
    status = entry.status
    goes_on = getattr(status, "run_id", None) == "e0.a1.x"
    assert (status.kind, entry.failures, entry.requeues, goes_on, entry.frames_used) == expected
    assert status.why == why
    assert getattr(status, "alone", False) is (why == "oom")
    last = outcomes.after_end(before, event, context(max_retries=0))
    if entry.failures and not isinstance(status, Failed):
        assert isinstance(last.status, Failed)
        assert last.status.why == f"{why}; attempt 1 of 1"
        assert last.frames_used == 8


def failed_at(entry: Entry, saved: int, frames: int = 8, code: int = 1) -> Entry:
    event = RunEnded("A", "e0.a1.x", Exited(cause=ExitCause.EXIT, code=code), frames, saved=saved)
    return outcomes.after_end(replace(entry, status=RUNNING), event, context(max_retries=9))


@pytest.mark.parametrize("frames", [8, 9, 0])
@pytest.mark.parametrize(("saved", "anew"), [(3, True), (4, False)])
def test_only_an_error_at_the_same_checkpoint_again_begins_anew(saved, anew, frames):
    first = failed_at(ENTRY, 3)
    assert (first.status.run_id, first.frames_used) == ("e0.a1.x", 0)
    second = failed_at(first, saved, frames)
    assert second.status.run_id == (None if anew else "e0.a1.x")
    assert second.frames_used == (frames if anew else 0), "frames are counted once"


def test_a_new_run_does_not_know_of_the_errors_of_the_one_before():
    second = failed_at(failed_at(ENTRY, 3), 3)
    assert failed_at(second, 3).status.run_id == "e0.a1.x"


@pytest.mark.parametrize("lived_seconds", [0, 10 * BACKOFF_CAP_SECONDS])
def test_another_error_of_the_disk_is_charged_after_so_many_ends(lived_seconds):
    event = RunEnded("A", "e0.a1.x", Exited(cause=ExitCause.EXIT, code=EXIT_IO), saved=1)
    later = replace(context(), now=NOW + timedelta(seconds=lived_seconds))
    entry, charges = ENTRY, []
    for _ in range(2 * MAX_REQUEUES + 2):
        entry = replace(outcomes.after_end(entry, event, later), status=RUNNING)
        charges.append(entry.failures)
    assert charges == [*[0] * MAX_REQUEUES, *[1] * (MAX_REQUEUES + 1), 2]


YIELDING = replace(ENTRY, status=replace(RUNNING, stop_reason=StopReason.YIELD))


def test_a_run_that_has_saved_gives_its_slot_uncharged():
    ended = Exited(cause=ExitCause.STOPPED, code=EXIT_RESUMABLE)
    event = RunEnded("A", "e0.a1.x", ended, 8, saved=1)
    entry = outcomes.after_end(YIELDING, event, context())
    assert (entry.failures, entry.status.run_id) == (0, "e0.a1.x")
    assert entry.status.queued_at == NOW


@pytest.mark.parametrize("full_disk", [False, True])
@pytest.mark.parametrize("facts", [{"signal": 9}, {"code": 1}, {"code": EXIT_DIVERGED}])
def test_a_run_that_does_not_save_when_it_is_to_give_its_slot_is_charged(facts, full_disk):
    ended = Exited(cause=ExitCause.STOPPED, **facts)
    event = RunEnded("A", "e0.a1.x", ended, 8, saved=1, full_disk=full_disk)
    entry = outcomes.after_end(YIELDING, event, context())
    assert (entry.failures, entry.requeues) == ((0, 1) if full_disk else (1, 0))
    anew = not full_disk and facts == {"code": EXIT_DIVERGED}
    assert entry.status.run_id == (None if anew else "e0.a1.x")
    assert entry.status.queued_at is None


def test_a_result_ends_the_counts_of_refusals_and_requeues():
    event = RunEnded("A", "e0.a1.x", RESULT)
    entry = outcomes.after_end(replace(ENTRY, refusals=3, requeues=3), event, context())
    assert isinstance(entry.status, Merging)
    assert (entry.refusals, entry.requeues) == (0, 0)


@pytest.mark.parametrize(
    ("ends", "attempts"),
    [
        ([(0.0, "converged"), (0.0, "converged")], 2),
        ([(0.001, "converged"), (0.002, "converged"), (0.001, "converged")], 3),
        ([(0.0, "converged"), (0.0, ""), (0.0, "converged")], 3),
        ([(0.0, ""), (0.0, ""), (0.0, ""), (0.0, ""), (0.0, "")], 5),
        ([(0.0, "pruned"), (0.0, "pruned"), (0.001, "pruned"), (0.0, ""), (0.0, "")], 5),
        ([(0.0, "converged"), (0.3, "converged")], 2),
    ],
)
def test_an_attempt_that_gets_stuck_no_higher_than_one_before_is_the_last(ends, attempts):
    entry = ENTRY
    for number, (success, stopped) in enumerate(ends, start=1):
        result = replace(RESULT, success_rate=success, stopped=stopped)
        event = RunEnded("A", "e0.a1.x", result)
        entry = outcomes.after_end(entry, event, context(max_retries=4))
        last, tried = entry.status, number
        if not isinstance(last, Waiting):
            break
        entry = replace(entry, status=replace(RUNNING, attempt=last.attempt))
    assert tried == attempts
    if success >= 0.01:
        assert isinstance(last, Merging)
    else:
        assert isinstance(last, Failed)
        assert last.attempt == attempts
        assert ("got stuck no higher" in last.why) == (stopped == "converged")
