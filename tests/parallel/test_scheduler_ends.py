"""What each way for a run to end leads to, as SkillScheduler plays it."""

from __future__ import annotations

import errno
import time

import pytest

from flowrl.errors import (
    EXIT_RESUMABLE,
    BusyError,
    ExpertMissingError,
    LaunchError,
    ResultRefusedError,
)
from flowrl.launchers.base import ExitCause, Lost
from flowrl.parallel import requests
from flowrl.parallel.events import Verb
from flowrl.paths import RunPaths
from flowrl.runs import write_progress
from tests.parallel.scheduling import exited, finished, lines, progress, status, words


def trains(scheduler, world):
    """Let all runs make an update that the daemon notices."""
    scheduler.tick()
    for _ in range(2):
        for process in world.living():
            world.advance(process.task.skill)
        scheduler.tick()


def test_a_run_out_of_memory_is_tried_again_alone_on_a_device(start, world, clock):
    scheduler = start("a", "b", "c", max_parallel_skills=9, devices={"0": 2})
    scheduler.tick()
    world.end("a", exited(ExitCause.OOM))
    clock.pass_seconds(1)
    scheduler.tick()
    assert sorted(p.task.skill for p in world.living()) == ["b", "c"]
    clock.pass_seconds(60)
    world.end("b")
    scheduler.tick()
    assert status(scheduler, "a").kind == "waiting"  # c still shares the device
    world.end("c")
    scheduler.tick()
    assert world.of("a").task.alone
    assert [p.task.skill for p in world.living()] == ["a"]


@pytest.mark.parametrize("max_retries", [0, 1, 2])
def test_max_retries_counts_the_retries_after_the_first_attempt(start, world, clock, max_retries):
    scheduler = start("A", max_retries=max_retries)
    for _ in range(max_retries + 1):
        scheduler.tick()
        world.end("A", exited(ExitCause.EXIT, code=1, detail="ImportError"))
        scheduler.tick()
        clock.pass_seconds(3600)
    assert [task.attempt for task in world.prepared] == list(range(1, max_retries + 2))
    assert words(scheduler) == {"A": "failed"}
    assert "exit 1 (ImportError)" in lines(scheduler)["A"]["why"]
    assert len(world.runs) == len(world.discarded) == 1, "it went on from what it had saved"
    assert not scheduler.state.complete
    assert scheduler.run() is scheduler.state


@pytest.mark.parametrize("why", [ExitCause.STOPPED, ExitCause.SERVER_KILLED])
def test_nobodys_fault_goes_on_at_once_in_the_same_run(start, world, why):
    scheduler = start("A", max_retries=0)
    scheduler.tick()
    run_id = world.folders["A"]
    world.end("A", exited(why))
    scheduler.tick()
    assert world.folders["A"] == run_id
    assert world.of("A").launches == 1
    assert [(task.attempt, task.run_id) for task in world.prepared] == [(1, None), (1, run_id)]


@pytest.mark.parametrize(
    "outcome",
    [exited(ExitCause.SIGNAL, signal=9), exited(ExitCause.SESSION_KILLED), Lost("no exit.json")],
    ids=["killed", "session", "lost"],
)
def test_a_whole_result_counts_however_its_process_ended(start, world, outcome):
    scheduler = start("A", max_retries=0)
    scheduler.tick()
    run_id = world.folders["A"]
    world.end("A", outcome, result=finished(run_id))
    scheduler.tick()
    assert words(scheduler) == {"A": "completed"}
    assert world.ledger == [run_id]


@pytest.mark.parametrize("why", [ExitCause.SESSION_KILLED, ExitCause.INTERRUPTED])
def test_what_a_user_ended_is_held_until_he_asks_for_a_retry(start, world, clock, why):
    scheduler = start("A", "B < A")
    scheduler.tick()
    run_id = world.folders["A"]
    world.end("A", exited(why))
    scheduler.tick()
    clock.pass_seconds(10_000)
    scheduler.tick()
    assert words(scheduler) == {"A": "held", "B": "blocked"}
    assert scheduler.state.settled
    requests.send_request(scheduler.graph_paths, Verb.RETRY, "A")
    requests.send_request(scheduler.graph_paths, Verb.RETRY, "Nobody")
    scheduler.tick()
    assert words(scheduler) == {"A": "running", "B": "waiting"}
    assert world.folders["A"] == run_id
    assert not list(scheduler.graph_paths.requests.iterdir())


def test_a_failure_blocks_its_dependants_and_nobody_else(start, world):
    scheduler = start(max_retries=0, max_parallel_skills=2)
    for name, needs in (("A", []), ("B", ["A"]), ("C", ["B"]), ("D", []), ("E", ["D"])):
        scheduler.add_skill(name, {}, needs)
    scheduler.tick()
    world.end("A", exited(ExitCause.SIGNAL, signal=9))
    scheduler.tick()
    assert lines(scheduler)["C"]["blocked_by"] == ["A"]
    world.end("D")
    scheduler.tick()
    assert words(scheduler) == {
        "A": "failed",
        "B": "blocked",
        "C": "blocked",
        "D": "completed",
        "E": "running",
    }
    scheduler.add_skill("F", {}, ["C"])
    assert words(scheduler)["F"] == "blocked"
    scheduler.ask("A", Verb.RETRY)
    assert words(scheduler)["F"] == "waiting"
    scheduler.tick()
    assert world.of("A").task.attempt == 2


def test_too_little_success_is_a_failed_attempt_and_is_not_merged(start, world, clock):
    scheduler = start("A", min_success_rate=0.5, max_retries=1, skill_timesteps_budget=1500)
    scheduler.tick()
    world.end("A", finished(world.folders["A"], success_rate=0.4))
    scheduler.tick()
    assert scheduler.state.entries["A"].frames_used == 1000
    clock.pass_seconds(60)
    scheduler.tick()
    assert world.of("A").task.frames_left == 500
    world.end("A", finished(world.folders["A"], success_rate=0.5))
    scheduler.tick()
    assert words(scheduler) == {"A": "completed"}
    assert len(world.ledger) == 1


def test_a_refused_launch_is_tried_again_without_a_charge_but_not_for_ever(start, world, clock):
    scheduler = start("A", max_retries=0)
    world.refusals["launch"] = [LaunchError("no tmux") for _ in range(5)]
    scheduler.tick()
    assert words(scheduler) == {"A": "waiting"}
    assert "no tmux" in lines(scheduler)["A"]["why"]
    for _ in range(5):
        clock.pass_seconds(600)
        scheduler.tick()
    assert words(scheduler) == {"A": "running"}
    assert scheduler.state.entries["A"].failures == 0
    assert len(world.runs) == 1
    scheduler.add_skill("B")
    world.refusals["launch"] = [LaunchError("no tmux") for _ in range(6)]
    for _ in range(6):
        scheduler.tick()
        clock.pass_seconds(600)
    assert words(scheduler)["B"] == "failed"


def test_one_skills_broken_needs_do_not_stop_the_others(start, world):
    scheduler = start("A", "B")
    world.refusals["prepare"] = [ExpertMissingError("expert 3 is gone; retrain it")]
    scheduler.tick()
    assert words(scheduler) == {"A": "failed", "B": "running"}
    assert "expert 3 is gone" in status(scheduler, "A").why


@pytest.mark.parametrize(
    "error",
    [
        BusyError("global.lock was held"),
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EROFS, "Read-only file system"),
    ],
    ids=["busy", "disk full", "read-only"],
)
def test_a_merge_that_lacks_room_or_a_lock_waits_and_never_fails(start, world, clock, error):
    scheduler = start("A", max_retries=0)
    scheduler.tick()
    world.refusals["merge"] = [error] * 30
    world.end("A")
    for _ in range(30):
        scheduler.tick()
        assert words(scheduler) == {"A": "merging"}
        assert lines(scheduler)["A"]["why"]
        scheduler.tick()
        clock.pass_seconds(600)
    scheduler.tick()
    assert words(scheduler) == {"A": "completed"}
    assert len(world.ledger) == 1


@pytest.mark.parametrize("verb", ["prepare", "launch", "merge"])
@pytest.mark.parametrize("backoff", [0.0, 1e-9])
def test_what_is_put_off_is_tried_once_in_a_tick(start, world, clock, verb, backoff):
    scheduler = start("A", retry_backoff=backoff)
    if verb == "merge":
        scheduler.tick()
        world.end("A")
    world.refusals[verb] = [BusyError("not now") for _ in range(3)]
    for left in (2, 1, 0):
        scheduler.tick()
        assert len(world.refusals[verb]) == left
        clock.pass_seconds(1)
    scheduler.tick()
    assert words(scheduler) == {"A": "completed" if verb == "merge" else "running"}


def test_a_refused_merge_is_a_failed_attempt(start, world, clock):
    scheduler = start("A", max_retries=1)
    scheduler.tick()
    first = world.folders["A"]
    world.refusals["merge"] = [ResultRefusedError("expert 0 has NaN")]
    world.end("A")
    scheduler.tick()
    assert "NaN" in status(scheduler, "A").why
    assert world.discarded == [first]
    clock.pass_seconds(60)
    scheduler.tick()
    world.end("A")
    scheduler.tick()
    assert status(scheduler, "A").attempt == 2
    assert first not in world.ledger


def test_a_silent_run_is_ended_and_charged(start, world, clock):
    scheduler = start("A", stall_timeout=0.001, max_retries=0)
    scheduler.tick()
    deadline = time.monotonic() + 10
    while not world.of("A").asked_to_end and time.monotonic() < deadline:
        scheduler.tick()
    world.end("A", exited(ExitCause.STOPPED))
    scheduler.tick()
    assert words(scheduler) == {"A": "failed"}
    assert "no progress" in status(scheduler, "A").why


def test_long_runs_give_their_slots_to_skills_that_wait_and_queue_again(start, world, clock):
    scheduler = start(max_parallel_skills=2, slot_minutes=10)
    for name in ("long", "longer"):
        scheduler.add_skill(name, priority=9)
    trains(scheduler, world)
    first = world.of("long").job.run_id
    clock.pass_seconds(3600)
    scheduler.tick()
    assert not any(process.asked_to_end for process in world.living()), "nobody waits"
    for name in ("a", "b", "c"):
        scheduler.add_skill(name)
    scheduler.tick()
    scheduler.tick()
    assert [process.asked_to_end for process in world.living()] == [True, True]
    for name in ("long", "longer"):
        world.end(name, exited(ExitCause.STOPPED, code=EXIT_RESUMABLE))
    clock.pass_seconds(1)
    scheduler.tick()
    assert sorted(process.task.skill for process in world.living()) == ["a", "b"]
    world.end("a")
    scheduler.tick()
    assert sorted(process.task.skill for process in world.living()) == ["b", "c"]
    world.end("b")
    scheduler.tick()
    assert sorted(process.task.skill for process in world.living()) == ["c", "long"]
    assert (status(scheduler, "long").run_id, status(scheduler, "long").attempt) == (first, 1)
    entry = scheduler.state.entries["long"]
    assert (entry.failures, entry.frames_used, entry.requeues) == (0, 0, 0)


@pytest.mark.parametrize(
    ("minutes", "seconds", "asked"), [(10, 599, 0), (10, 600, 1), (0, 10**6, 0)]
)
def test_only_as_many_runs_give_their_slots_as_skills_wait(
    start, world, clock, minutes, seconds, asked
):
    scheduler = start("a", "b", max_parallel_skills=2, slot_minutes=minutes)
    trains(scheduler, world)
    clock.pass_seconds(seconds)
    scheduler.add_skill("waits")
    for _ in range(3):
        scheduler.tick()
    assert sum(process.asked_to_end for process in world.living()) == asked


def test_skills_that_gave_their_slots_do_not_overtake_one_that_needs_a_device_alone(
    start, world, clock
):
    scheduler = start(max_parallel_skills=9, devices={"0": 2}, slot_minutes=1, retry_backoff=0)
    for name in "abc":
        scheduler.add_skill(name)
    trains(scheduler, world)
    world.end("a", exited(ExitCause.OOM))
    scheduler.tick()
    for name in "bc":
        trains(scheduler, world)
        clock.pass_seconds(60)
        scheduler.tick()
        assert world.of(name).asked_to_end
        world.end(name, exited(ExitCause.STOPPED, code=EXIT_RESUMABLE))
        scheduler.tick()
    assert [process.task.skill for process in world.living()] == ["a"]


def test_a_run_that_has_made_no_update_keeps_its_slot(start, world, clock):
    scheduler = start("a", "b", max_parallel_skills=1, slot_minutes=1)
    scheduler.tick()
    for _ in range(9):
        folder = world.of("a").job.folder
        folder.mkdir(parents=True, exist_ok=True)
        write_progress(RunPaths(folder, 0), progress(folder.name, 0, phase="compiling", speed=0.0))
        clock.pass_seconds(3600)
        scheduler.tick()
    write_progress(RunPaths(folder, 0), progress(folder.name, 5, speed=0.0))
    scheduler.tick()
    assert not world.of("a").asked_to_end
    write_progress(RunPaths(folder, 0), progress(folder.name, 6))
    scheduler.tick()
    clock.pass_seconds(60)
    scheduler.tick()
    scheduler.tick()
    assert world.of("a").asked_to_end


def test_two_runs_that_hang_and_share_a_slot_are_given_up(start, world, clock):
    scheduler = start(max_parallel_skills=1, slot_minutes=1, max_retries=2, retry_backoff=0)
    for name in "ab":
        scheduler.add_skill(name)
    for _ in range(9):
        trains(scheduler, world)
        clock.pass_seconds(60)
        scheduler.tick()
        scheduler.tick()
        for process in world.living():
            if process.asked_to_end:
                world.end(process.task.skill, exited(ExitCause.STOPPED, signal=9))
            else:
                assert words(scheduler)["a"] == "failed", "nobody waits for the other's slot"
        scheduler.tick()
    assert words(scheduler) == {"a": "failed", "b": "running"}


def test_checkpoints_are_counted_by_their_names_and_other_names_are_ignored(start, world):
    scheduler = start("A")
    scheduler.tick()
    resume = RunPaths(world.of("A").job.folder, 0).resume
    for name in ("6", "9" * 200, "\u00b2", "-9", ".tmp-8"):
        (resume / name).mkdir(parents=True)
    world.end("A", exited(ExitCause.EXIT, code=1))
    scheduler.tick()
    assert scheduler.state.entries["A"].error_at == 7
    assert start().state.entries["A"].error_at == 7
