"""The scheduler's step, event by event: what it orders, and what it ignores."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from flowrl.config import ScheduleConfig
from flowrl.launchers.base import ExitCause, Exited, Handle
from flowrl.parallel import events
from flowrl.parallel.events import ControlRequest, RunRequest, StopMode, Verb
from flowrl.parallel.state import SchedulerState, Slots
from flowrl.parallel.status import (
    PAUSED,
    Blocked,
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
from flowrl.parallel.transitions import step
from tests.parallel.scheduling import finished

NOW = datetime(2030, 1, 1, tzinfo=UTC)
SOON = NOW + timedelta(seconds=5)
HANDLE = Handle(run_id="e0.a1.x", session="flowrl_e0_A", pid=1)
RUNNING = Running(run_id="e0.a1.x", attempt=1, handle=HANDLE, since=NOW)
MERGING = Merging(
    run_id="e0.a1.x", attempt=2, frames=8, success_rate=0.5, wall_seconds=1.0, since=NOW
)
DONE = Completed(run_id="e0.a1.x", attempt=1, frames=8, success_rate=0.5, wall_seconds=1.0, at=NOW)
STOPPED = Exited(cause=ExitCause.STOPPED)


def state_of(**statuses) -> SchedulerState:
    """Skills without needs in these statuses, experts 0, 1, …; what only waits has none yet."""
    skills = tuple(
        Entry(skill=name, status=status, expert=None if isinstance(status, Waiting) else number)
        for number, (name, status) in enumerate(statuses.items())
    )
    before = NOW - timedelta(seconds=1)
    received = [events.SkillsAdded(skills)]
    return step(SchedulerState(), received, before, ScheduleConfig(), launching=False)[0]


def then(state, *received, launching=False, devices=None, **schedule):
    """The next state, and the commands without reports of changes."""
    config = ScheduleConfig(retry_backoff=5.0, **schedule)
    new, ordered = step(state, received, NOW, config, launching=launching, devices=devices or {})
    return new, [item for item in ordered if not isinstance(item, events.StatusChange)]


def asked(state, verb, skill=None, **facts):
    """The state after a request, and the commands."""
    return then(state, ControlRequest(id="1", verb=verb, skill=skill, **facts))


def statuses(state):
    return [entry.status.kind for entry in state.entries.values()]


# Events that do not fit are ignored


@pytest.mark.parametrize(
    "event",
    [
        events.RunLaunched("A", "e0.a2.y", HANDLE),
        events.RunEnded("A", "e0.a2.y", STOPPED),
        events.RunLate("A", "e0.a2.y", StopReason.HUNG),
        events.MergeDone("A", "e0.a1.x"),
        events.MergeRefused("A", "e0.a1.x", "why"),
        events.RunPrepared("A", "e0.a1.x"),
        events.PrepareRefused("A", "why"),
        events.LaunchRefused("A", "why"),
        events.Deferred("A", "why"),
        events.Asked("A", Verb.RETRY),
    ],
    ids=lambda event: type(event).__name__,
)
def test_an_event_of_another_run_or_status_changes_nothing(event):
    state = state_of(A=RUNNING)
    assert then(state, event) == (state, [])


@pytest.mark.parametrize(
    "event",
    [
        events.RunEnded("A", "e0.a1.x", STOPPED),
        events.MergeDone("A", "e0.a2.y"),
        events.RunPrepared("A", "e0.a1.x"),
        events.LaunchRefused("A", "why"),
        events.Asked("A", Verb.PAUSE),
    ],
    ids=lambda event: type(event).__name__,
)
def test_a_merge_is_ended_by_its_own_events_only(event):
    state = state_of(A=replace(MERGING, not_before=SOON))
    assert then(state, event) == (state, [])


# A run's way through the statuses


def test_a_prepared_run_is_launched_where_it_was_prepared():
    preparing = Preparing(attempt=2, devices=("1",), since=NOW, run_id="old", alone=True)
    state, ordered = then(state_of(A=preparing), events.RunPrepared("A", "new"))
    request = RunRequest(skill="A", expert=0, attempt=2, run_id="new", devices=("1",), alone=True)
    assert ordered == [events.Launch(request)]
    assert state.entries["A"].status == Running(
        run_id="new", attempt=2, handle=None, devices=("1",), since=NOW, alone=True
    )


def test_a_launched_run_forgets_earlier_refusals():
    state = state_of(A=replace(RUNNING, handle=None))
    state, _ = then(state, events.LaunchRefused("A", "no pty"))
    assert state.entries["A"].refusals == 1
    state = replace(state, entries={"A": replace(state.entries["A"], status=RUNNING)})
    state, _ = then(state, events.RunLaunched("A", "e0.a1.x", HANDLE))
    assert state.entries["A"].refusals == 0


def test_a_merge_is_ordered_without_a_device():
    state = state_of(A=replace(RUNNING, devices=("1",), alone=True))
    _, ordered = then(state, events.RunEnded("A", "e0.a1.x", finished("e0.a1.x")))
    request = RunRequest(skill="A", expert=0, attempt=1, run_id="e0.a1.x")
    assert ordered == [events.Merge(request)]


@pytest.mark.parametrize(("used", "left"), [(0, 10), (4, 6), (10, 0), (12, 0)])
def test_a_run_is_given_what_is_left_of_the_budget(used, left):
    state = state_of(A=Waiting())
    entry = replace(state.entries["A"], frames_used=used)
    state = replace(state, entries={"A": entry})
    _, ordered = then(state, launching=True, skill_timesteps_budget=10)
    assert ordered[0].request.frames_left == left


def test_a_run_that_begins_anew_is_discarded_and_one_that_goes_on_is_not():
    state = state_of(A=RUNNING)
    anew = Exited(cause=ExitCause.NO_RESULT)
    _, ordered = then(state, events.RunEnded("A", "e0.a1.x", anew))
    assert [type(item) for item in ordered] == [events.Discard]
    assert ordered[0].request.run_id == "e0.a1.x"
    for cause in (ExitCause.OOM, ExitCause.STOPPED):
        ended = events.RunEnded("A", "e0.a1.x", Exited(cause=cause), saved=1)
        assert then(state, ended)[1] == []


def test_a_refused_merge_is_an_attempt_that_used_its_frames():
    state, ordered = then(state_of(A=MERGING), events.MergeRefused("A", "e0.a1.x", "bad"))
    entry = state.entries["A"]
    assert (entry.failures, entry.frames_used, entry.status.attempt) == (1, 8, 3)
    assert [type(item) for item in ordered] == [events.Discard]


# Merges that wait, and who starts


def test_a_deferred_merge_is_ordered_when_its_time_has_come():
    early = state_of(A=replace(MERGING, not_before=SOON, why="full"))
    assert then(early) == (early, [])
    state, ordered = then(state_of(A=replace(MERGING, not_before=NOW, why="full")))
    assert [type(item) for item in ordered] == [events.Merge]
    status = state.entries["A"].status
    assert (status.not_before, status.why) == (None, "")
    assert then(state)[1] == [], "it is ordered once"


@pytest.mark.parametrize(("not_before", "starts"), [(SOON, True), (None, False)])
def test_only_a_merge_under_way_lets_other_skills_wait(not_before, starts):
    state = state_of(A=replace(MERGING, not_before=not_before), B=Waiting())
    _, ordered = then(state, launching=True)
    assert bool(ordered) is starts


def test_a_skill_whose_wait_is_not_over_lets_the_next_one_start():
    state = state_of(A=Waiting(not_before=SOON), B=Waiting())
    _, ordered = then(state, launching=True, max_parallel_skills=1)
    assert [item.request.skill for item in ordered] == ["B"]


def test_nothing_starts_while_the_daemon_stops_or_may_not_launch():
    state = state_of(A=Waiting())
    assert then(state, launching=False)[1] == []
    assert then(replace(state, stop_mode=StopMode.STOP), launching=True)[1] == []


def test_what_was_ordered_is_ordered_again_after_a_restart():
    state = state_of(
        A=Preparing(attempt=1, since=NOW),
        B=replace(RUNNING, handle=None),
        C=replace(RUNNING, stop_reason=StopReason.PAUSE),
        D=RUNNING,
        E=MERGING,
        F=replace(MERGING, not_before=SOON),
        G=DONE,
        H=Waiting(not_before=SOON),
    )
    _, ordered = then(state, events.Restarted())
    found = {item.request.skill: type(item) for item in ordered}
    assert found == {
        "A": events.Prepare,
        "B": events.Launch,
        "C": events.StopRun,
        "E": events.Merge,
    }
    assert [item.seek for item in ordered if isinstance(item, events.Launch)] == [True]


def test_skills_that_are_added_under_way_are_ordered_again():
    skill = Entry(skill="A", status=replace(RUNNING, handle=None), expert=4)
    _, ordered = then(SchedulerState(), events.SkillsAdded((skill, Entry(skill="B"))))
    assert [(type(item), item.request.expert) for item in ordered] == [(events.Launch, 4)]


# Slots of devices


def slots(active=(), *, runs=9, each=1, **devices):
    schedule = ScheduleConfig(max_parallel_skills=runs, devices_per_run=each)
    return Slots(schedule, devices, [entry for state in active for entry in state.entries.values()])


def test_a_run_of_its_own_device_waits_for_an_empty_one():
    found = slots(a=2, b=2)
    assert found.take(alone=False) == ("a",)
    assert found.take(alone=True) == ("b",)
    assert found.take(alone=True) is None
    assert found.take(alone=False) == ("a",), "no run joins the one that is alone"
    assert found.take(alone=False) is None


def test_devices_fill_by_the_share_that_is_taken():
    found = slots(small=1, large=3)
    names = [("small",), ("large",), ("large",), ("large",), None]
    assert [found.take(alone=False) for _ in names] == names


def test_running_and_preparing_runs_occupy_their_devices():
    active = state_of(
        A=Preparing(attempt=1, devices=("a",), since=NOW, alone=True),
        B=replace(RUNNING, devices=("b",)),
        C=replace(MERGING),
    )
    found = slots([active], a=2, b=2)
    assert found.take(alone=False) == ("b",)
    assert found.take(alone=False) is None


def test_more_runs_than_are_allowed_now_leave_no_room():
    active = state_of(A=RUNNING, B=replace(RUNNING, run_id="e1.a1.x"))
    assert slots([active], runs=1).take(alone=False) is None


def test_without_devices_only_the_number_of_runs_counts():
    found = slots(runs=2)
    assert [found.take(alone=alone) for alone in (True, False, True)] == [(), (), None]


# Requests


def test_pausing_all_skips_what_cannot_pause_and_goes_on():
    state = state_of(A=DONE, B=Waiting(), C=RUNNING)
    state, ordered = asked(state, Verb.PAUSE)
    assert statuses(state) == ["completed", "held", "running"]
    assert state.entries["C"].status.stop_reason is StopReason.PAUSE
    assert [type(item) for item in ordered] == [events.StopRun]


def test_resuming_all_wakes_what_was_paused_on_request():
    held = Held(why="the session was killed", attempt=1, at=NOW)
    paused = replace(held, why=PAUSED, run_id="e2.a1.x")
    state, _ = asked(state_of(A=DONE, B=held, C=paused), Verb.RESUME)
    assert statuses(state) == ["completed", "held", "waiting"]
    assert state.entries["C"].status.run_id == "e2.a1.x"


@pytest.mark.parametrize(
    ("first", "second", "mode"),
    [
        (Verb.STOP, Verb.STOP_NOW, StopMode.STOP_NOW),
        (Verb.STOP_NOW, Verb.STOP, StopMode.STOP_NOW),
        (Verb.STOP, Verb.RESUME, StopMode.NONE),
    ],
)
def test_a_stop_becomes_more_urgent_and_never_less(first, second, mode):
    requests = [ControlRequest(id=verb, verb=verb) for verb in (first, second)]
    assert then(state_of(A=RUNNING), *requests)[0].stop_mode is mode


def test_pausing_all_does_not_take_a_stop_back():
    state = replace(state_of(A=Waiting()), stop_mode=StopMode.STOP)
    assert asked(state, Verb.PAUSE)[0].stop_mode is StopMode.STOP


def test_a_request_is_handled_once_whatever_comes_with_it():
    first = ControlRequest(id="1", verb=Verb.PRIORITY, skill="A", number=3)
    other = ControlRequest(id="2", verb=Verb.PRIORITY, skill="B", number=4)
    again = replace(first, number=9)
    state, _ = then(state_of(A=Waiting(), B=Waiting()), first, other, again)
    assert [entry.priority for entry in state.entries.values()] == [3, 4]
    assert [response.id for response in state.responses] == ["1", "2"]


def test_a_request_that_cannot_be_understood_is_refused():
    state, _ = asked(state_of(A=Waiting()), None)
    assert state.responses[0].outcome == "refused: it cannot be understood"
    assert state.responses[0].verb == ""


@pytest.mark.parametrize(
    ("status", "waiting"),
    [
        (Failed(why="x", attempt=2, at=NOW), Waiting(attempt=3)),
        (Held(why="x", attempt=2, at=NOW, run_id="r"), Waiting(attempt=2, run_id="r")),
        (
            Waiting(attempt=2, not_before=SOON, why="x", run_id="r"),
            Waiting(attempt=2, why="x", run_id="r"),
        ),
    ],
    ids=["failed", "held", "waiting"],
)
def test_a_retry_resets_the_counts(status, waiting):
    state = state_of(A=status)
    entry = replace(state.entries["A"], failures=1, frames_used=2, refusals=3, requeues=4)
    state, _ = asked(replace(state, entries={"A": entry}), Verb.RETRY, "A")
    assert state.entries["A"] == replace(
        entry, status=waiting, failures=0, frames_used=0, refusals=0, requeues=0
    )


@pytest.mark.parametrize(
    ("status", "attempt", "run_id"),
    [
        (Waiting(attempt=2, run_id="r"), 2, "r"),
        (Preparing(attempt=3, since=NOW, run_id="r"), 3, "r"),
        (Blocked(blocked_by=("B",)), 1, None),
    ],
    ids=["waiting", "preparing", "blocked"],
)
def test_a_skill_that_does_not_run_is_held_at_once(status, attempt, run_id):
    state, ordered = asked(state_of(A=status), Verb.PAUSE, "A")
    held = Held(why=PAUSED, attempt=attempt, at=NOW, run_id=run_id)
    assert state.entries["A"].status == held
    assert ordered == []


@pytest.mark.parametrize(
    ("status", "discarded"),
    [
        (Held(why="x", attempt=2, at=NOW, run_id="r"), ["r"]),
        (Held(why="x", attempt=2, at=NOW), []),
        (Preparing(attempt=2, since=NOW, run_id="r"), ["r"]),
        (Blocked(blocked_by=("B",)), []),
    ],
    ids=["held run", "held", "preparing", "blocked"],
)
def test_a_cancelled_skill_fails_and_its_run_is_discarded(status, discarded):
    state, ordered = asked(state_of(A=status), Verb.CANCEL, "A")
    attempt = getattr(status, "attempt", 1)
    cancelled = Failed(why="cancelled on request", attempt=attempt, at=NOW)
    assert state.entries["A"].status == cancelled
    assert [(item.request.run_id, item.request.attempt) for item in ordered] == [
        (run_id, attempt) for run_id in discarded
    ]


def test_a_running_skill_is_asked_once_to_end():
    state, ordered = asked(state_of(A=RUNNING), Verb.CANCEL, "A")
    assert [type(item) for item in ordered] == [events.StopRun]
    request = ControlRequest(id="2", verb=Verb.CANCEL, skill="A")
    assert then(state, request)[1] == []


def test_a_late_run_is_asked_to_end_unless_somebody_did():
    event = events.RunLate("A", "e0.a1.x", StopReason.OVERDUE)
    state, ordered = then(state_of(A=RUNNING), event)
    assert state.entries["A"].status.stop_reason is StopReason.OVERDUE
    assert [type(item) for item in ordered] == [events.StopRun]
    paused = state_of(A=replace(RUNNING, stop_reason=StopReason.PAUSE))
    assert then(paused, event) == (paused, [])
