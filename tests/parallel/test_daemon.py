"""The daemon around the scheduler: locks, full disks, kills, stops, waiting."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from flowrl.errors import BusyError, FileRefusedError, FormatVersionError, LaunchError
from flowrl.launchers.base import ExitCause, Lost
from flowrl.parallel import health
from flowrl.parallel.events import Verb
from flowrl.parallel.requests import send_request
from flowrl.parallel.scheduler import SkillScheduler
from flowrl.parallel.state import StateFile
from tests.parallel.scheduling import (
    Clock,
    FakeBackend,
    FakeLauncher,
    Killed,
    World,
    exited,
    lines,
    status,
    words,
)


def test_a_run_whose_folder_is_gone_is_lost(start, world, clock):
    scheduler = start("A")
    scheduler.tick()
    world.end("A")
    world.folders.pop("A")
    clock.pass_seconds(100_000)  # nobody scheduled for a day
    scheduler = start()
    scheduler.tick()
    assert words(scheduler) == {"A": "waiting"}
    assert "folder is gone" in status(scheduler, "A").why


def test_a_run_that_was_merged_by_hand_counts(start, world):
    scheduler = start("A")
    scheduler.tick()
    run_id = world.folders["A"]
    world.end("A")
    world.ledger.append(run_id)  # process_completed_training, while no scheduler ran
    del world.folders["A"]
    scheduler = start()
    scheduler.tick()
    assert words(scheduler) == {"A": "completed"}
    assert world.ledger == [run_id]


def test_a_daemon_killed_at_any_operation_goes_on_where_it_was(tmp_path):
    """The fault loop: every N-th operation on the world and its files, until none is met."""
    for fatal in range(1, 1000):
        if _survives(tmp_path / str(fatal), fatal):
            break
    assert 30 < fatal < 999


def _survives(root, fatal):
    """Whether the daemon came through without meeting its fault."""
    world, clock = World(root=root / "runs", die_at=fatal), Clock()
    trouble = iter([exited(ExitCause.EXIT, code=1), None, exited(ExitCause.STOPPED)])

    def play():
        clock.pass_seconds(5)
        for process in world.living():
            outcome = next(trouble, None)
            world.end(process.task.skill, outcome)

    unharmed = True
    for _ in range(2):
        launcher = FakeLauncher(world, on_wait=play)
        scheduler = SkillScheduler(root, launcher=launcher, clock=clock, max_parallel_skills=2)
        scheduler.set_callbacks(backend=FakeBackend(world))
        try:
            for name, needs in (("A", []), ("B", []), ("C", ["A", "B"])):
                scheduler.add_skill(name, {}, needs)
            state = scheduler.run()
            break
        except Killed:
            unharmed = False
        finally:
            scheduler.close()
    assert state.complete
    merged = [entry.status.run_id for entry in state.entries.values()]
    assert sorted(world.ledger) == sorted(merged)
    assert sorted(entry.expert for entry in state.entries.values()) == [0, 1, 2]
    assert not world.living()
    return unharmed


def test_every_command_follows_a_save_of_the_state_that_issued_it(start, world, monkeypatch):
    scheduler = start("A", "B < A")
    scheduler.tick()
    world.end("A")
    calls = []
    save, op = StateFile.save, world.op
    monkeypatch.setattr(StateFile, "save", lambda *args: calls.append("save") or save(*args))
    monkeypatch.setattr(world, "op", lambda verb: calls.append(verb) or op(verb))
    scheduler.tick()
    words = [word for word in calls if word in ("save", "merge", "prepare", "launch", "put away")]
    of_merge = ["save", "merge", "save"]  # then the callbacks are heard, before a slot is given
    pairs = [*of_merge, "save", "prepare", "save", "launch", "save", "put away"]
    assert words == pairs


def test_a_run_is_reopened_only_once_it_is_saved_how_it_ended(start, world):
    scheduler = start("A")
    scheduler.tick()
    world.end("A", exited(ExitCause.STOPPED))
    seen = []

    class Spy(FakeBackend):
        def resume(self, task):
            seen.append(lines(scheduler)["A"]["status"])
            return super().resume(task)

    scheduler.set_callbacks(backend=Spy(world))
    scheduler.tick()
    assert seen == ["preparing"]


def test_a_request_on_a_full_disk_does_not_keep_the_daemon_awake(start, world, monkeypatch):
    scheduler = start("A", scheduler_poll_interval=60.0)
    scheduler.tick()
    send_request(scheduler.graph_paths, Verb.PAUSE, "A")
    monkeypatch.setenv("FLOWRL_FAULT", "write.scheduler_state.json:enospc")
    scheduler.tick()
    waits = []
    monkeypatch.setattr(
        scheduler.launcher,
        "wait",
        lambda handles, *, timeout_seconds: waits.append(timeout_seconds) or True,
    )
    scheduler.wait()
    assert waits == [1.0]
    send_request(scheduler.graph_paths, Verb.RETRY, "A")
    scheduler.wait()
    assert waits == [1.0], "a new request is heard at once"
    monkeypatch.delenv("FLOWRL_FAULT")
    scheduler.tick()
    assert not scheduler.inbox.waiting
    assert not list(scheduler.graph_paths.requests.iterdir())


def test_a_failure_to_save_that_will_not_pass_ends_the_daemon_with_a_remedy(start, world):
    scheduler = start("A")
    scheduler.graph_paths.scheduler_state.unlink()
    scheduler.graph_paths.scheduler_state.mkdir()
    with pytest.raises(FileRefusedError, match=r"scheduler_state\.json cannot be .* start again"):
        scheduler.run()
    assert not world.living()


def test_a_second_daemon_is_told_who_has_the_folder(start, tmp_path, monkeypatch):
    first = start()
    first.add_skill("A")
    second = SkillScheduler(tmp_path / "graph", launcher=FakeLauncher(World()))
    slept: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append)
    monkeypatch.setattr(health, "time", clock)
    with pytest.raises(BusyError, match=f"process {os.getpid()} on ") as caught:
        second.add_skill("B")
    assert sum(slept) < 0.5
    assert caught.value.exit_code == 75
    first.close()
    second.add_skill("B")
    second.close()


def test_a_state_is_not_saved_over_that_of_another_hosts_scheduler(start):
    scheduler = start("A", shared_folder=True)
    before = scheduler.graph_paths.scheduler_state.read_bytes()
    scheduler.graph_paths.daemon_lock.with_suffix(".claim").unlink()
    with pytest.raises(BusyError, match="taken by another scheduler"):
        scheduler.add_skill("B")
    assert scheduler.graph_paths.scheduler_state.read_bytes() == before


def test_a_deleted_lock_file_stops_the_daemon(start):
    scheduler = start("A")
    scheduler.graph_paths.daemon_lock.unlink()
    with pytest.raises(BusyError, match="deleted or replaced"):
        scheduler.tick()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{", FileRefusedError),
        ("[]", FormatVersionError),
        ('{"format": 99, "next_expert": 0, "skills": []}', FormatVersionError),
    ],
    ids=["torn", "another form", "newer"],
)
def test_an_unreadable_state_stops_the_program_and_is_left_alone(start, text, error):
    scheduler = start()
    scheduler.graph_paths.root.mkdir(parents=True)
    scheduler.graph_paths.scheduler_state.write_text(text)
    with pytest.raises(error, match=r"scheduler_state\.json"):
        scheduler.run()
    assert scheduler.graph_paths.scheduler_state.read_text() == text


def test_waiting_ends_when_a_retry_is_due(start, world, clock):
    scheduler = start("A", retry_backoff=7, scheduler_poll_interval=30)
    scheduler.tick()
    world.end("A", Lost())
    scheduler.tick()
    scheduler.wait()
    assert scheduler.launcher.waits[-1] == pytest.approx(1.0)
    clock.pass_seconds(100)
    scheduler.tick()
    assert words(scheduler) == {"A": "running"}


def test_a_launch_that_succeeded_unnoticed_is_adopted(start, world, clock):
    scheduler = start("A")
    world.refusals["launched"] = [LaunchError("no answer from tmux")]
    scheduler.tick()
    assert words(scheduler) == {"A": "waiting"}
    clock.pass_seconds(60)
    scheduler.tick()
    assert words(scheduler) == {"A": "running"}
    world.end("A")
    scheduler.tick()
    assert len(world.runs) == len(world.ledger) == 1


def test_the_merge_of_another_run_is_not_taken_for_this_one(start, world, monkeypatch):
    scheduler = start("A", max_retries=0)
    scheduler.tick()
    world.end("A")
    monkeypatch.setattr(FakeBackend, "merge", lambda self, task: {"run_id": "e9.a9.9"})
    scheduler.tick()
    assert words(scheduler) == {"A": "failed"}
    assert "e9.a9.9" in status(scheduler, "A").why
