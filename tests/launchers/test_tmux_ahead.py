"""Sessions that are begun before their runs' folders are there: who waits, and who ends them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flowrl.launchers import early, files, processes
from flowrl.launchers.expecting import Expected
from flowrl.launchers.job import Finished, Job
from flowrl.launchers.tmux import TmuxLauncher
from tests.launchers.conftest import SLEEP, SUCCEED, end_of, start_of, until
from tests.launchers.tmux_sessions import sessions

pytestmark = pytest.mark.tmux

SAID = "print('said', flush=True)\n"
LEAVE_ALONE = """
import sys, time
from pathlib import Path
from flowrl.launchers.expecting import Expected
from flowrl.launchers.tmux import TmuxLauncher
name, run_id, folder = sys.argv[1:]
TmuxLauncher("test").expect(Expected(name=name, run_id=run_id, folder=Path(folder)))
print("expected", flush=True)
time.sleep(600)
"""


def expected(job: Job, run_id: str = "", *, made: bool = False) -> Expected:
    """The job before its folder is there, or while it has not been launched."""
    if not made:
        job.folder.rmdir()
    return Expected(name=job.name, run_id=run_id or job.run_id, folder=job.folder)


def pids_of(tmux: TmuxLauncher) -> list[int]:
    return [pane.pid for pane in tmux._panes()]


def waiting(job: Job) -> bool:
    """Whether a runner waits for the job and its log's writer has the pipe."""
    spec = str(job.folder / "spec.json")
    return len(processes.with_last_words(spec)) == 2 and not pipes_of(job)


def pipes_of(job: Job) -> list[Path]:
    return list(job.folder.parent.glob(".tmp-*"))


def test_a_runner_waits_for_its_folder_and_runs_in_it_once_it_is_launched(tmux, make_job):
    job = make_job(SAID + SUCCEED % "e0.a1.x")
    tmux.expect(expected(job))
    until(lambda: waiting(job))
    assert not job.folder.exists()
    (before,) = pids_of(tmux)
    job.folder.mkdir()
    handle = tmux.launch(job)
    assert handle.pid == before
    assert isinstance(end_of(tmux, handle, job), Finished)
    until(lambda: (job.folder / "training.log").read_text() == "said\n")
    tmux.expect_nothing()
    assert sessions(tmux) == [job.name]


@pytest.mark.parametrize("made", [False, True], ids=["before its folder", "in its folder"])
def test_a_launch_that_was_expected_asks_tmux_nothing_more(tmux, make_job, monkeypatch, made):
    asked, begin = [], tmux._server.begin
    monkeypatch.setattr(
        tmux._server, "begin", lambda *words: asked.append(words[0]) or begin(*words)
    )
    job = make_job(SUCCEED % "e0.a1.x")
    run = expected(job, made=made)
    tmux.expect(run)
    tmux.expect(run)
    job.folder.mkdir(exist_ok=True)
    assert isinstance(end_of(tmux, tmux.launch(job), job), Finished)
    assert asked == ["new-session"]


@pytest.mark.parametrize("late", [False, True], ids=["at once", "when all wait"])
def test_what_was_expected_in_vain_leaves_nothing(tmux, make_job, late):
    tmux.launch(keeper := make_job(SLEEP, name="flowrl_e1_x"))
    job = make_job(SLEEP)
    tmux.expect(expected(job))
    if late:
        until(lambda: waiting(job))
    tmux.expect_nothing()
    assert sessions(tmux) == [keeper.name]
    until(lambda: not processes.with_last_words(str(job.folder / "spec.json")))
    assert not pipes_of(job)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "ended"])
def test_who_waits_leaves_with_its_session_when_its_launcher_is_gone(tmux, make_job, tmp_path, how):
    tmux.launch(keeper := make_job(SLEEP, name="flowrl_e1_x"))
    job = make_job(SLEEP)
    run = expected(job)
    words = [sys.executable, "-c", LEAVE_ALONE, run.name, run.run_id, str(run.folder)]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as daemon:
        assert daemon.stdout is not None
        assert daemon.stdout.readline()
        until(lambda: waiting(job))
        daemon.send_signal(how)
    until(lambda: sessions(tmux) == [keeper.name])
    until(lambda: not processes.with_last_words(str(job.folder / "spec.json")))
    assert not job.folder.exists()


def test_a_session_that_is_killed_while_it_waits_is_begun_again_by_the_launch(tmux, make_job):
    tmux.launch(make_job(SLEEP, name="flowrl_e1_x"))
    job = make_job(SLEEP)
    tmux.expect(expected(job))
    until(lambda: waiting(job))
    tmux._tmux("kill-session", "-t", f"={job.name}")
    until(lambda: not processes.with_last_words(str(job.folder / "spec.json")))
    job.folder.mkdir()
    handle = tmux.launch(job)
    assert handle.pid == start_of(job).runner_pid
    assert tmux.poll(handle, job.folder) is None


def test_who_waits_for_another_run_makes_room_for_this_one(tmux, make_job):
    job = make_job(SLEEP)
    tmux.expect(expected(job, run_id="e0.a1.other"))
    job.folder.mkdir()
    handle = tmux.launch(job)
    assert handle.pid == start_of(job).runner_pid
    assert [pane.run_id for pane in tmux._panes()] == [job.run_id]


def test_a_name_that_is_taken_is_left_to_the_launch(tmux, make_job):
    tmux._tmux("new-session", "-d", "-s", "flowrl_e0_Wood", "--", "sleep", "600")
    job = make_job(SLEEP)
    tmux.expect(expected(job))
    job.folder.mkdir()
    assert tmux.launch(job).session == "flowrl_e0_Wood_2"
    start_of(job)
    assert not pipes_of(job)


def test_nothing_is_begun_for_a_folder_that_was_launched_before(tmux, make_job):
    job = make_job(SLEEP)
    files.prepare(job, grace_seconds=1.0)
    tmux.expect(Expected(name=job.name, run_id=job.run_id, folder=job.folder))
    assert not tmux._ahead._begun


@pytest.mark.parametrize("lacking", ["tmux", "cat"])
def test_what_cannot_be_begun_ahead_is_no_error(tmux, make_job, monkeypatch, lacking):
    which, job = shutil.which, make_job(SLEEP)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "which", lambda name: None if name == lacking else which(name))
        tmux.expect(expected(job))
        tmux.expect_nothing()
    job.folder.mkdir()
    tmux.launch(job)
    start_of(job)


def test_a_session_without_its_options_is_not_used(tmux, make_job, monkeypatch):
    job = make_job(SLEEP)
    with monkeypatch.context() as patch:
        patch.setattr("flowrl.launchers.tmux_words.RUN_OPTION", "no_such_option")
        tmux.expect(expected(job))
    job.folder.mkdir()
    handle = tmux.launch(job)
    assert handle.pid == start_of(job).runner_pid
    assert [pane.run_id for pane in tmux._panes()] == [job.run_id]


def test_nobody_waits_for_ever(monkeypatch, tmp_path):
    monkeypatch.setattr(early, "WAIT_SECONDS", 0.2)
    us = (str(os.getpid()), processes.birth_of(os.getpid()))
    assert not early.await_spec(str(tmp_path / "spec.json"), us)
    (tmp_path / "spec.json").touch()
    assert early.await_spec(str(tmp_path / "spec.json"), us)


def test_closing_ends_the_sessions_that_wait(tmux, make_job):
    job = make_job(SLEEP)
    tmux.expect(expected(job))
    until(lambda: waiting(job))
    tmux.close()
    assert pids_of(tmux) == []
