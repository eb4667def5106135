"""What only holds for tmux: its sessions, their users, and its server's death."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from flowrl.errors import LaunchError
from flowrl.launchers import process, run_status
from flowrl.launchers.base import ExitCause, Exited, Finished
from tests.launchers.conftest import SAVING, SLEEP, STUBBORN, end_of, signal_to, start_of, until
from tests.launchers.tmux_sessions import cause_of, sessions, somebody_attached

pytestmark = pytest.mark.tmux


@pytest.mark.parametrize("others", [0, 1], ids=["the only session", "one of two"])
def test_a_killed_session_is_told_from_a_killed_server(tmux, make_job, others):
    for number in range(others):
        tmux.launch(make_job(SLEEP, name=f"flowrl_e{number + 1}_x"))
    job = make_job(SLEEP)
    handle = tmux.launch(job)
    start_of(job)
    tmux.server.run("kill-session", "-t", f"={job.name}")
    assert cause_of(end_of(tmux, handle, job)) is ExitCause.SESSION_KILLED


def test_a_killed_session_of_a_trainer_that_saves_is_held(tmux, make_job):
    job = make_job(SAVING + SLEEP)
    handle = tmux.launch(job)
    start_of(job)
    tmux.server.run("kill-session", "-t", f"={job.name}")
    outcome = end_of(tmux, handle, job)
    assert isinstance(outcome, Exited)
    assert (outcome.cause, outcome.code) == (ExitCause.SESSION_KILLED, 85)


@pytest.mark.parametrize("how", ["kill-server", "SIGKILL", "SIGTERM"])
def test_a_dead_server_ends_its_runs_and_is_recognised(tmux, make_job, how):
    jobs = [make_job(SLEEP, name=f"flowrl_e{number}_x") for number in range(3)]
    handles = [tmux.launch(job) for job in jobs]
    for job in jobs:
        start_of(job)
    if how == "kill-server":
        tmux.server.run("kill-server")
    else:
        signal_to(handles[0].server_pid, getattr(signal, how))
    for handle, job in zip(handles, jobs, strict=True):
        assert cause_of(end_of(tmux, handle, job)) is ExitCause.SERVER_KILLED


def test_what_was_killed_is_known_however_late_it_is_asked(tmux, make_job):
    job = make_job(SLEEP)
    handle = tmux.launch(job)
    start_of(job)
    tmux.server.run("kill-session", "-t", f"={job.name}")
    until((job.folder / "exit.json").exists)
    until(lambda: not process.start_time_of(handle.server_pid or 0))
    assert cause_of(end_of(tmux, handle, job)) is ExitCause.SESSION_KILLED


def test_runs_start_again_on_a_new_server(tmux, make_job):
    job = make_job(SLEEP)
    first = tmux.launch(job)
    start_of(job)
    signal_to(first.server_pid)
    end_of(tmux, first, job)
    (job.folder / "ready").unlink()
    second = tmux.launch(job)
    start_of(job)
    assert second.server_pid != first.server_pid
    assert tmux.poll(second, job.folder) is None


def test_ctrl_c_in_the_pane_is_an_interruption(tmux, make_job):
    job = make_job(SLEEP)
    handle = tmux.launch(job)
    start_of(job)
    tmux.server.run("send-keys", "-t", f"={job.name}:", "C-c")
    assert cause_of(end_of(tmux, handle, job)) is ExitCause.INTERRUPTED


def test_stopping_the_run_that_began_the_server_leaves_the_server_to_the_others(tmux, make_job):
    jobs = [make_job(SLEEP, name=f"flowrl_e{n}_Wood", run_id=f"e{n}.a1.x") for n in range(3)]
    handles = [tmux.launch(job) for job in jobs[:2]]
    started = [start_of(job) for job in jobs[:2]]
    tmux.stop(handles[0], jobs[0].folder)
    assert cause_of(end_of(tmux, handles[0], jobs[0])) is ExitCause.STOPPED
    assert tmux.launch(jobs[2]).server_pid == started[1].server_pid
    start_of(jobs[2])
    assert tmux.poll(handles[1], jobs[1].folder) is None


def test_a_name_that_begins_like_another_is_another(tmux, make_job):
    long, short = make_job(SLEEP, name="flowrl_e1_Collect_Wood"), make_job(SLEEP, name="flowrl_e1")
    first = tmux.launch(long)
    second = tmux.launch(short)
    assert first.pid != second.pid
    assert sorted(sessions(tmux)) == ["flowrl_e1", "flowrl_e1_Collect_Wood"]
    for job in (long, short):
        start_of(job)
    tmux.stop(second, short.folder)
    end_of(tmux, second, short)
    until(lambda: tmux.wait([], timeout_seconds=0) or sessions(tmux) == [long.name])
    assert tmux.poll(first, long.folder) is None


def test_a_former_run_leaves_its_session_to_the_next(tmux, make_job):
    old = make_job("raise SystemExit(1)")
    new = replace(make_job(SLEEP, run_id="e0.a2.y"), folder=old.folder, cwd=old.folder)
    first = tmux.launch(old)
    end_of(tmux, first, old)
    with somebody_attached(tmux, old.name):
        second = tmux.launch(new)
        start_of(new)
        assert sessions(tmux) == [old.name]
    assert second.pane == first.pane
    assert tmux.find(new) == second
    assert tmux.poll(second, new.folder) is None


def test_the_output_of_the_next_run_goes_to_its_own_log(tmux, make_job):
    old, new = make_job("print('old')"), make_job("print('new')", run_id="e0.a2.y")
    for job in (old, new):
        end_of(tmux, tmux.launch(job), job)
    for job, text in ((old, "old\n"), (new, "new\n")):  # each has a writer of its own
        until(lambda log=job.folder / "training.log", text=text: log.read_text() == text)


def test_another_live_run_keeps_its_session(tmux, make_job):
    other = make_job(SLEEP, run_id="e0.a1.other")
    handle = tmux.launch(other)
    start_of(other)
    with pytest.raises(LaunchError, match="a process of this run still lives"):
        tmux.launch(replace(make_job(SLEEP), folder=other.folder))
    assert tmux.poll(handle, other.folder) is None


def test_a_former_run_that_still_lives_is_told_with_what_ends_it(tmux, make_job, monkeypatch):
    old = make_job(SLEEP)
    tmux.launch(old)
    new = replace(make_job(SLEEP, run_id="e0.a2.y"), folder=old.folder, name="flowrl_e0_Oak")
    monkeypatch.setattr(run_status, "prepare", lambda job, *, grace_seconds: None)
    monkeypatch.setattr("flowrl.launchers.tmux._FORMER_RUN_SECONDS", 0.0)
    what = "flowrl_e0_Oak still lives; to end it: tmux -L test kill-session -t flowrl_e0_Wood"
    with pytest.raises(LaunchError, match=f"{what}$"):
        tmux.launch(new)


def test_a_session_that_is_not_ours_is_left_alone(tmux, make_job):
    tmux.server.run("new-session", "-d", "-s", "flowrl_e0_Wood", "--", "sleep", "600")
    job = make_job(SLEEP)
    assert tmux.launch(job).session == "flowrl_e0_Wood_2"
    start_of(job)
    assert sessions(tmux) == ["flowrl_e0_Wood", "flowrl_e0_Wood_2"]
    assert (
        tmux.server.run("list-panes", "-s", "-t", "=flowrl_e0_Wood", "-F", "#{pane_dead}").stdout
        == "0\n"
    )


def test_a_run_that_has_just_been_launched_is_adopted_by_name(tmux, make_job, monkeypatch):
    job = make_job(STUBBORN)
    first = tmux.launch(job)
    start_of(job)
    (job.folder / "start.json").unlink()  # as if its runner had not come so far
    monkeypatch.setattr(run_status, "prepare", lambda job, *, grace_seconds: None)
    assert tmux.launch(job) == first


def test_folders_with_odd_names_work(tmux, make_job, tmp_path):
    job = make_job("print('here')")
    odd = tmp_path / "a b'\"#{pid}%d%%$(id);"
    odd.mkdir()
    job = replace(job, folder=odd, cwd=odd)
    assert isinstance(end_of(tmux, tmux.launch(job), job), Finished)
    until(lambda: (odd / "training.log").read_text() == "here\n")


def test_twenty_ends_at_once_are_all_heard(tmux, make_job):
    jobs = [make_job(SLEEP, name=f"flowrl_e{number}_x") for number in range(20)]
    runs = [(tmux.launch(job), job) for job in jobs]
    for job in jobs:
        signal_to(start_of(job).job_pid)
    assert [cause_of(end_of(tmux, handle, job)) for handle, job in runs] == [ExitCause.SIGNAL] * 20


def test_the_trainer_has_a_terminal(tmux, make_job):
    job = make_job("import os; print(os.isatty(0), os.isatty(1), os.get_terminal_size().columns)")
    end_of(tmux, tmux.launch(job), job)
    until(lambda: (job.folder / "training.log").read_text() == "True True 160\n")
