"""Runs that were launched before: found, adopted, started anew, never mistaken for others."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from flowrl.errors import LaunchError
from flowrl.launchers import process, run_status
from flowrl.launchers.base import ExitCause, Exited, Finished, Job, Lost
from flowrl.launchers.local import LocalLauncher
from tests.launchers.conftest import (
    SLEEP,
    STUBBORN,
    SUCCEED,
    end_of,
    signal_to,
    start_of,
    trainer_of,
    until,
)
from tests.waiting import limit


def test_launching_a_live_run_again_adopts_it(launcher, make_job):
    job = make_job(SLEEP)
    first = launcher.launch(job)
    trainer = trainer_of(job)
    second = launcher.launch(job)
    assert second.pid == first.pid
    assert trainer_of(job) == trainer


def test_an_ended_run_is_started_anew_in_its_folder(launcher, make_job):
    source = "import os, sys\nif not os.path.exists('old'): open('old', 'w'); sys.exit(85)\n"
    job = make_job(source + SUCCEED % "e0.a1.x")
    first = end_of(launcher, launcher.launch(job), job)
    assert isinstance(first, Exited)
    assert first.cause is ExitCause.STOPPED
    assert isinstance(end_of(launcher, launcher.launch(job), job), Finished)


def test_another_daemon_finds_the_run_and_hears_its_end(launcher, make_job):
    job = make_job(SLEEP)
    assert launcher.find(job) is None
    handle = launcher.launch(job)
    start_of(job)
    found = type(launcher)().find(job)
    assert found is not None
    assert (found.pid, found.start_time, found.pane) == (handle.pid, handle.start_time, handle.pane)
    assert found.server_pid == handle.server_pid
    other = LocalLauncher()
    assert other.poll(found, job.folder) is None
    os.kill(trainer_of(job), signal.SIGKILL)
    assert isinstance(end_of(other, found, job), Exited)


def test_a_run_that_ended_unwatched_is_found_with_its_outcome(launcher, make_job):
    job = make_job(SUCCEED % "e0.a1.x")
    end_of(launcher, launcher.launch(job), job)
    found = launcher.find(job)
    assert found is not None
    assert isinstance(launcher.poll(found, job.folder), Finished)


def test_a_launch_removes_the_results_of_a_former_one(launcher, make_job):
    once = "import os, sys\nif os.path.exists('old'): sys.exit(0)\nopen('old', 'w')\n"
    job = make_job(once + SUCCEED % "e0.a1.x" + "\nsys.exit(85)")
    first = end_of(launcher, launcher.launch(job), job)
    assert isinstance(first, Exited)
    assert first.cause is ExitCause.STOPPED
    assert (job.folder / "result.json").exists()
    assert isinstance(end_of(launcher, launcher.launch(job), job), Finished)
    assert not (job.folder / "result.json").exists()


def test_a_folder_of_another_run_is_not_found(launcher, make_job):
    job = make_job("pass")
    end_of(launcher, launcher.launch(job), job)
    assert launcher.find(replace(job, run_id="e0.a2")) is None


def test_a_held_lock_of_unknown_origin_refuses_the_launch(launcher, make_job):
    job = make_job("pass")
    first = launcher.launch(make_job(STUBBORN, run_id="e0.a9.z"))
    lock = until(lambda: list(job.folder.parent.rglob("run.lock")))[0]
    until(lambda: run_status.lock_held(lock.parent))
    (job.folder / "run.lock").hardlink_to(lock)
    with pytest.raises(LaunchError, match=r"run\.lock is held"):
        launcher.launch(job)
    assert process.alive(first.pid, first.start_time)


def test_a_reused_pid_is_not_our_run(launcher, make_job):
    job = make_job(STUBBORN)  # it outlives the hangup of its pane
    handle = launcher.launch(job)
    start = start_of(job)
    for pid in (start.runner_pid, start.job_pid):
        signal_to(pid)
    end_of(launcher, handle, job)
    facts = json.loads((job.folder / "start.json").read_text())
    facts["runner_pid"] = facts["job_pid"] = os.getpid()
    (job.folder / "start.json").write_text(json.dumps(facts))
    forged = type(handle)(
        **{n: getattr(handle, n) for n in handle.__slots__} | {"pid": os.getpid()}
    )
    launcher.stop(forged, job.folder)  # would end this test
    assert isinstance(launcher.poll(forged, job.folder), Lost)


def test_a_daemon_out_of_descriptors_takes_no_run_for_dead(launcher, make_job):
    job = make_job(STUBBORN)
    handle = launcher.launch(job)
    start = start_of(job)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_now = max(int(entry.name) for entry in Path("/proc/self/fd").iterdir())
    for spare in range(open_now + 3):
        resource.setrlimit(resource.RLIMIT_NOFILE, (spare, hard))
        try:
            outcome = launcher.poll(handle, job.folder)
        except OSError:
            outcome = None
        finally:
            launcher.wait([handle], timeout_seconds=0)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert outcome is None
    assert process.alive(start.job_pid or 0, start.job_start_time)


def test_a_launch_without_descriptors_is_refused_and_may_be_tried_again(launcher, make_job):
    """EMFILE at any of its steps: a LaunchError or an OSError, and nothing of the run lives."""
    job = make_job(SLEEP)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_now = max(int(entry.name) for entry in Path("/proc/self/fd").iterdir())
    refused = 0
    for spare in range(open_now):
        resource.setrlimit(resource.RLIMIT_NOFILE, (spare, hard))
        try:
            launcher.launch(job)
        except (LaunchError, OSError):
            refused += 1
        else:
            break
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        until(lambda: not run_status.lock_held(job.folder))
    assert refused > 3
    job = make_job(SLEEP, name="flowrl_e1_x")
    handle = launcher.launch(job)
    start_of(job)
    assert launcher.poll(handle, job.folder) is None


def test_a_run_from_before_a_reboot_went_down_with_the_machine(launcher, make_job):
    job = make_job("pass")
    handle = launcher.launch(job)
    end_of(launcher, handle, job)
    (job.folder / "exit.json").unlink()
    (job.folder / "start.json").unlink()
    outcome = launcher.poll(replace(handle, start_time="0:1"), job.folder)
    assert isinstance(outcome, Exited)
    assert outcome.cause is ExitCause.SERVER_KILLED


LAUNCHING = """
import os, signal, sys
from pathlib import Path
from flowrl.launchers.base import Job
from flowrl.launchers.local import LocalLauncher
from flowrl.launchers.tmux import TmuxLauncher

kind, folder = sys.argv[1:]
launcher = TmuxLauncher("test") if kind == "TmuxLauncher" else LocalLauncher()
words = ("sh", "-c", "touch ready; while [ ! -e go ]; do sleep 0.01; done; echo 42 > sum; exit 0")
env = {"PATH": os.environ["PATH"]}
job = Job(name="sum", run_id="sum.1", argv=words, env=env,
          cwd=folder, folder=Path(folder), log="log")
launcher.launch(job)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_job_that_is_no_training_survives_a_killed_scheduler(launcher, tmp_path):
    kind = type(launcher)
    words = [sys.executable, "-c", LAUNCHING, kind.__name__, str(tmp_path)]
    assert subprocess.run(words, check=False, timeout=limit(60)).returncode == -signal.SIGKILL
    until((tmp_path / "ready").exists)
    job = Job(name="sum", run_id="sum.1", argv=("true",), env={}, cwd=tmp_path, folder=tmp_path)
    handle = until(lambda: launcher.find(job))
    assert launcher.poll(handle, tmp_path) is None
    (tmp_path / "go").touch()
    assert end_of(launcher, handle, job) == Finished(tmp_path)
    assert (tmp_path / "sum").read_text() == "42\n"
