"""Runs that take too long, by real processes: they end, are charged, and the others go on."""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from pathlib import Path

import pytest

from flowrl import storage
from flowrl.launchers import process, run_status
from flowrl.launchers.base import Handle, Job
from flowrl.launchers.local import LocalLauncher
from flowrl.parallel import health
from flowrl.parallel.events import RunRequest, Verb
from flowrl.parallel.health import RunLimits, age_seconds
from flowrl.parallel.scheduler import SkillScheduler
from flowrl.parallel.status import StopReason
from tests.launchers.conftest import until
from tests.parallel.scheduling import JobsBackend, status, words

SLEEPER = "import time; print('ready', flush=True); time.sleep(600)"


def job_of(task: RunRequest, root: Path, run_id: str) -> Job:
    folder = storage.make_dir(root / run_id)
    return Job(
        name=f"flowrl_e{task.expert}_{task.skill}",
        run_id=run_id,
        argv=(sys.executable, "-c", SLEEPER),
        env={"PATH": os.environ["PATH"]},
        cwd=root,
        folder=folder,
    )


@pytest.fixture
def daemon(tmp_path):
    """Start a daemon whose trainers sleep for ten minutes."""
    opened = []

    def start(**settings):
        settings = {"max_retries": 0, "scheduler_poll_interval": 0.2, **settings}
        launcher = LocalLauncher(grace_seconds=1.0)
        launcher.shared_folder = settings.get("shared_folder", False)
        scheduler = SkillScheduler(tmp_path / "graph", launcher=launcher, **settings)
        make = lambda task: job_of(task, tmp_path, f"e{task.expert}.a{task.attempt}.00")  # noqa: E731
        scheduler.set_callbacks(backend=JobsBackend(make))
        opened.append(scheduler)
        return scheduler

    yield start
    for scheduler in opened:
        scheduler.close()


def trainer_of(scheduler, tmp_path, skill):
    handle = status(scheduler, skill).handle
    folder = tmp_path / handle.run_id
    until(lambda: "ready" in (folder / "training.log").read_text())
    until(lambda: run_status.read_start(folder, handle.run_id).job_pid is not None)
    return run_status.read_start(folder, handle.run_id)


def beats_until(scheduler, wanted):
    def beat():
        scheduler.wait()
        scheduler.tick()
        return wanted()

    until(beat)


def test_a_run_that_takes_longer_than_it_may_is_ended_and_charged(daemon, tmp_path):
    scheduler = daemon(run_timeout=2.0)
    scheduler.add_skill("A")
    scheduler.tick()
    start = trainer_of(scheduler, tmp_path, "A")
    beats_until(scheduler, lambda: words(scheduler) == {"A": "failed"})
    assert "it took longer than --run_timeout" in status(scheduler, "A").why
    assert scheduler.state.entries["A"].failures == 1
    assert not process.alive(start.job_pid, start.job_start_time)


@pytest.mark.parametrize("shared", [False, True], ids=["", "shared"])
@pytest.mark.parametrize("stopped", ["trainer", "runner and trainer"])
def test_a_stopped_trainer_is_ended(daemon, tmp_path, stopped, shared):
    """FAULTS 18: TERM alone does not wake a stopped process."""
    scheduler = daemon(stall_timeout=0.5, shared_folder=shared)
    scheduler.add_skill("A")
    scheduler.tick()
    start = trainer_of(scheduler, tmp_path, "A")
    os.kill(start.job_pid, signal.SIGSTOP)
    if stopped != "trainer":
        os.kill(start.runner_pid, signal.SIGSTOP)
    beats_until(scheduler, lambda: words(scheduler) == {"A": "failed"})
    assert "no progress for too long" in status(scheduler, "A").why
    assert not process.alive(start.job_pid, start.job_start_time)
    assert not process.alive(start.runner_pid, start.runner_start_time)


def test_time_in_which_the_scheduler_was_frozen_is_no_silence(start, world, monkeypatch):
    """As by `docker pause`, which freezes the trainers, too."""
    now = [0.0]
    monkeypatch.setattr(
        "flowrl.parallel.scheduler.RunLimits", partial(RunLimits, monotonic=lambda: now[0])
    )
    scheduler = start("A", stall_timeout=300.0, scheduler_poll_interval=30.0)
    scheduler.tick()
    world.advance("A")
    for frozen in (30.0, 30.0, 86_400.0, 30.0):
        now[0] += frozen
        scheduler.tick()
        assert not world.of("A").asked_to_end
    for _ in range(10):
        now[0] += 30.0
        scheduler.tick()
    assert world.of("A").asked_to_end


def test_a_run_that_starts_while_it_has_to_end_is_asked_soon(daemon, tmp_path, monkeypatch):
    scheduler = daemon(scheduler_poll_interval=600.0)
    scheduler.add_skill("A")
    scheduler.tick()
    start = trainer_of(scheduler, tmp_path, "A")
    with monkeypatch.context() as patch:  # as long as its runner has not written start.json
        patch.setattr(LocalLauncher, "find", lambda self, job: None)
        scheduler.ask("A", Verb.PAUSE)
        scheduler.tick()
    assert process.alive(start.job_pid, start.job_start_time)
    beats_until(scheduler, lambda: words(scheduler) == {"A": "held"})
    assert not process.alive(start.job_pid, start.job_start_time)


def test_a_run_counts_from_its_process_and_not_from_the_daemons_start(daemon, tmp_path):
    scheduler = daemon()
    scheduler.add_skill("A")
    scheduler.tick()
    trainer_of(scheduler, tmp_path, "A")
    handle = status(scheduler, "A").handle
    until(lambda: 0.2 < age_seconds(handle.start_time) < 60)
    limits = RunLimits(silent_seconds=9.0, run_seconds=1000.0)
    most = 1000.0 - age_seconds(handle.start_time)
    assert most >= limits.seconds_left(handle) >= 1000.0 - age_seconds(handle.start_time)
    run_status.request_stop(tmp_path / handle.run_id)
    until(lambda: not process.alive(handle.pid, handle.start_time))


def test_a_process_of_unknown_age_is_not_overdue():
    handle = Handle(run_id="r", session="s", pid=2, start_time="another boot:7")
    assert RunLimits(silent_seconds=9.0, run_seconds=10.0).seconds_left(handle) == 10.0
    default = RunLimits(silent_seconds=9.0, run_seconds=None)
    assert default.seconds_left(handle) == float("inf")
    assert default.seconds_left(handle, 7.0) == 7.0


def test_an_overdue_run_is_asked_once_and_its_silence_changes_nothing(start, world, monkeypatch):
    monkeypatch.setattr(health, "age_seconds", lambda start_time: 1.0)
    scheduler = start("A", run_timeout=1e-9, stall_timeout=1e-9, max_retries=0)
    for _ in range(4):
        scheduler.tick()
    assert status(scheduler, "A").stop_reason is StopReason.OVERDUE
    assert world.of("A").asked_to_end
