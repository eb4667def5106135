"""What holds for every launcher, with real processes and real signals."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from flowrl.errors import LaunchError
from flowrl.launchers import process, run_status
from flowrl.launchers.base import ExitCause, Exited, Finished, Lost
from tests.launchers.conftest import (
    ENDS,
    READY,
    SAVING,
    SLEEP,
    STUBBORN,
    SUCCEED,
    end_of,
    signal_to,
    start_of,
    trainer_of,
    until,
)


def test_exit_code_0_is_success_whatever_the_job_was(launcher, make_job):
    job = make_job(SUCCEED % "e0.a1.x")
    outcome = end_of(launcher, launcher.launch(job), job)
    assert outcome == Finished(job.folder)


@pytest.mark.parametrize(("source", "why", "code", "number"), ENDS)
def test_other_ends_are_told_apart(launcher, make_job, source, why, code, number):
    job = make_job(source)
    outcome = end_of(launcher, launcher.launch(job), job)
    assert isinstance(outcome, Exited)
    assert (outcome.cause, outcome.code, outcome.signal) == (why, code, number)
    assert outcome.detail


def test_a_program_that_cannot_be_started_says_so(launcher, make_job):
    launcher.shared_folder = False  # there the program is started by what ties it to its runner
    job = replace(make_job(""), argv=("/no",))
    outcome = end_of(launcher, launcher.launch(job), job)
    assert isinstance(outcome, Exited)
    assert (outcome.cause, outcome.code) == (ExitCause.EXIT, 127)
    assert "No such file" in outcome.detail


def test_a_copy_of_a_living_runs_folder_is_no_living_run(launcher, make_job, tmp_path):
    job = make_job(SLEEP)
    handle = launcher.launch(job)
    start_of(job)
    copy = shutil.copytree(job.folder, tmp_path / "copy")
    assert isinstance(run_status.outcome(handle, copy), Lost)
    assert run_status.outcome(handle, job.folder) is None
    launcher.stop(handle, job.folder)
    end_of(launcher, handle, job)


def test_a_killed_trainer_is_a_signal(launcher, make_job):
    job = make_job(SLEEP)
    handle = launcher.launch(job)
    os.kill(trainer_of(job), signal.SIGKILL)
    outcome = end_of(launcher, handle, job)
    assert isinstance(outcome, Exited)
    assert (outcome.cause, outcome.signal) == (ExitCause.SIGNAL, 9)


def test_cancel_lets_the_trainer_save(launcher, make_job):
    job = make_job(SAVING + SLEEP)
    handle = launcher.launch(job)
    start_of(job)
    launcher.stop(handle, job.folder)
    outcome = end_of(launcher, handle, job)
    assert isinstance(outcome, Exited)
    assert (outcome.cause, outcome.code) == (ExitCause.STOPPED, 85)


def test_a_stubborn_trainer_is_killed_after_the_grace(launcher, make_job):
    launcher.grace_seconds = 0.2
    job = make_job(STUBBORN)
    handle = launcher.launch(job)
    start_of(job)
    launcher.stop(handle, job.folder)
    outcome = end_of(launcher, handle, job)
    assert isinstance(outcome, Exited)
    assert (outcome.cause, outcome.signal) == (ExitCause.STOPPED, 9)


def test_a_trainer_whose_runner_was_killed_is_ended(launcher, make_job):
    job = make_job(STUBBORN)
    handle = launcher.launch(job)
    start = start_of(job)
    os.kill(start.runner_pid, signal.SIGKILL)
    assert isinstance(end_of(launcher, handle, job), Lost)
    assert not run_status.lock_held(job.folder)
    # The kernel closes a process's files an instant before it is gone.
    until(lambda: not process.alive(start.job_pid or 0, start.job_start_time))


def test_an_orphan_that_holds_the_lock_under_another_name_is_ended(launcher, make_job):
    child = "import os, sys\nif os.fork(): sys.exit(0)\nos.setsid()\n"
    job = make_job(child + STUBBORN + READY)
    handle = launcher.launch(job)
    until((job.folder / "exit.json").exists)
    until((job.folder / "ready").exists)
    assert run_status.lock_held(job.folder)
    (job.folder / "exit.json").unlink()  # as if the runner had been killed too
    assert isinstance(end_of(launcher, handle, job), Lost)
    assert not run_status.lock_held(job.folder)


def test_an_end_that_the_trainer_makes_up_does_not_count(launcher, make_job):
    made_up = {
        "format": 1, "run_id": "e0.a1.x", "code": 0, "signal": None, "oom": False,
        "received": [], "detail": "", "ended_at": 0.0,
    }  # fmt: skip
    forge = f"import json; open('exit.json', 'w').write(json.dumps({made_up!r}))\n"
    job = make_job(forge + "open('forged', 'w').close()\n" + SLEEP)
    handle = launcher.launch(job)
    start_of(job)
    assert (job.folder / "forged").exists()
    assert launcher.poll(handle, job.folder) is None
    launcher.stop(handle, job.folder)
    outcome = end_of(launcher, handle, job)
    assert isinstance(outcome, Exited)
    assert outcome.cause is ExitCause.STOPPED


def test_runner_and_trainer_killed_leave_no_trace(launcher, make_job):
    job = make_job(STUBBORN)
    handle = launcher.launch(job)
    start = start_of(job)
    for pid in (start.runner_pid, start.job_pid):
        signal_to(pid)
    assert isinstance(end_of(launcher, handle, job), Lost)


def test_a_frozen_runner_is_alive(launcher, make_job):
    job = make_job(SLEEP)
    handle = launcher.launch(job)
    start = start_of(job)
    os.kill(start.runner_pid, signal.SIGSTOP)
    assert launcher.poll(handle, job.folder) is None
    os.kill(start.runner_pid, signal.SIGCONT)
    launcher.stop(handle, job.folder)
    assert isinstance(end_of(launcher, handle, job), Exited)


def test_argv_and_environment_arrive_as_they_are(launcher, make_job):
    words = ("$(id)", "`id`", "a b", "'\"", "new\nline", "end;", ";", "ünïcödé ☃", "#{pid} %d", "")
    env = {"ODD": "$(id); '\"\n☃;", "EMPTY": ""}
    source = "import json, os, sys; json.dump([sys.argv[1:], dict(os.environ), os.getcwd()]"
    job = make_job(source + ", open('got', 'w'))", argv=words, env=env)
    end_of(launcher, launcher.launch(job), job)
    argv, environ, cwd = json.loads((job.folder / "got").read_text())
    assert tuple(argv) == words
    assert {name: environ[name] for name in environ if name != "LC_CTYPE"} == env  # Python's own
    assert cwd == str(job.folder)


def test_the_log_takes_everything(launcher, make_job):
    job = make_job("for i in range(20000): print('line', i)\nprint('☃', flush=True)")
    end_of(launcher, launcher.launch(job), job)
    log = job.folder / "training.log"
    until(lambda: "☃".encode() in log.read_bytes())
    assert log.read_text().splitlines() == [f"line {i}" for i in range(20000)] + ["☃"]


def test_the_trainer_runs_on_the_cpus_of_its_job(launcher, make_job):
    cpu = max(os.sched_getaffinity(0))
    source = "import os; open('got', 'w').write(str(sorted(os.sched_getaffinity(0))))"
    job = make_job(source, cpus=(cpu,))
    end_of(launcher, launcher.launch(job), job)
    assert (job.folder / "got").read_text() == str([cpu])


def test_every_fast_exit_is_noticed(launcher, make_job):
    codes = range(1, 9 if launcher.shared_folder else 26)
    jobs = [make_job(f"raise SystemExit({n})", name=f"flowrl_e{n}") for n in codes]
    handles = [(launcher.launch(job), job) for job in jobs]
    ends = [end_of(launcher, handle, job) for handle, job in handles]
    assert [end.code for end in ends if isinstance(end, Exited)] == [*codes]


def test_waiting_ends_with_the_first_end(launcher, make_job):
    slow, quick = make_job(SLEEP), make_job(SLEEP, name="flowrl_e1_x")
    handles = [launcher.launch(slow), launcher.launch(quick)]
    start_of(slow)
    os.kill(trainer_of(quick), signal.SIGKILL)
    began = time.monotonic()
    while launcher.poll(handles[1], quick.folder) is None:
        launcher.wait(handles, timeout_seconds=60.0)
    assert time.monotonic() - began < 50.0
    assert launcher.poll(handles[0], slow.folder) is None


def test_a_runner_that_cannot_read_its_spec_is_lost(launcher, make_job, monkeypatch):
    def write(job, **_):
        (job.folder / "spec.json").write_text("no JSON")

    monkeypatch.setattr(run_status, "prepare", write)
    job = make_job("pass")
    assert isinstance(end_of(launcher, launcher.launch(job), job), Lost)


def test_children_of_the_daemon_leave_no_zombies(local, make_job):
    job = make_job("pass")
    handle = local.launch(job)
    end_of(local, handle, job)
    until(lambda: local.poll(handle, job.folder) and not Path(f"/proc/{handle.pid}").exists())


def test_no_python_is_a_launch_error(local, make_job, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/no/python")
    with pytest.raises(LaunchError, match="cannot be started"):
        local.launch(make_job("pass"))
