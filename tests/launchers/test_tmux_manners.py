"""How flowrl behaves as a guest on the user's tmux server, and when the server misbehaves."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from flowrl.config import LaunchConfig
from flowrl.errors import ConfigError, LaunchError
from flowrl.launchers import process, run_status
from flowrl.launchers.base import ExitCause, Exited, Finished
from flowrl.launchers.tmux import TmuxLauncher
from flowrl.parallel.start import open_launcher
from tests.launchers.conftest import SLEEP, STUBBORN, SUCCEED, end_of, signal_to, start_of, until
from tests.launchers.tmux_sessions import cause_of, sessions, somebody_attached
from tests.machine import program

pytestmark = pytest.mark.tmux


def test_the_session_of_a_job_that_succeeds_ends_with_it(tmux, make_job):
    keeper = make_job(SLEEP, name="flowrl_e1_x")
    tmux.launch(keeper)
    job = make_job("print('done')")
    with_a_log = tmux.launch(job)
    assert isinstance(end_of(tmux, with_a_log, job), Finished)
    until(lambda: tmux.wait([], timeout_seconds=0) or sessions(tmux) == [keeper.name])
    until(lambda: (job.folder / "training.log").read_text() == "done\n")


@pytest.mark.parametrize("end", ["raise SystemExit(85)", "raise SystemExit(130)", SLEEP, STUBBORN])
def test_the_session_of_a_job_that_was_asked_to_end_ends_with_it(tmux, make_job, end):
    keeper = make_job(SLEEP, name="flowrl_e1_x")
    tmux.launch(keeper)
    tmux.grace_seconds = 0.5
    job = make_job(end)
    handle = tmux.launch(job)
    if end in (SLEEP, STUBBORN):
        start_of(job)
        tmux.stop(handle, job.folder)
    assert isinstance(end_of(tmux, handle, job), Exited)
    until(lambda: tmux.wait([], timeout_seconds=0) or sessions(tmux) == [keeper.name])


def test_a_pane_that_closes_while_its_next_run_begins_is_no_failure(tmux, make_job, monkeypatch):
    job = make_job("raise SystemExit(1)")
    end_of(tmux, tmux.launch(job), job)
    panes = tmux.server.panes()
    tmux.server.run("kill-pane", "-t", panes[0].pane)
    answers = iter([panes])
    real = tmux.server.panes
    monkeypatch.setattr(tmux.server, "panes", lambda: next(answers, None) or real())
    again = replace(job, run_id="e0.a2.x", argv=make_job(SLEEP).argv)
    assert tmux.poll(tmux.launch(again), again.folder) is None


def test_a_server_that_flowrl_starts_knows_no_secret(tmux, make_job, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-hunter2hunter2")
    monkeypatch.setenv("WANDB_API_KEY", "hunter2hunter2")
    monkeypatch.setenv("https_proxy", "http://ann:hunter2hunter2@proxy:3128")
    tmux.launch(make_job(SLEEP))
    known = tmux.server.run("show-environment", "-g").stdout
    assert "hunter2" not in known
    assert "PATH=" in known


def test_a_scheduler_inside_another_server_uses_the_users_own(tmux, make_job, monkeypatch):
    handle = tmux.launch(make_job(SLEEP))
    path = tmux.server.run("display-message", "-p", "#{socket_path}").stdout.strip()
    monkeypatch.setenv("TMUX", f"{path},{handle.server_pid},0")
    assert TmuxLauncher().server.panes() == []


def test_closing_leaves_runs_and_their_server_alone(tmux, make_job):
    job = make_job(SLEEP)
    handle = tmux.launch(job)
    start_of(job)
    tmux.close()
    assert tmux.poll(handle, job.folder) is None


@pytest.mark.parametrize("command", ["kill-session", "kill-server"])
def test_a_server_ends_with_its_last_session_though_the_daemon_is_gone(tmux, make_job, command):
    job = make_job(STUBBORN)
    server = tmux.launch(job).server_pid or 0
    start_of(job)
    del tmux  # nobody closes it
    TmuxLauncher("test").server.run(command)
    until(lambda: not process.start_time_of(server))
    assert run_status.lock_held(job.folder)  # it did not wait for the trainer either


def test_no_option_of_the_server_or_its_other_sessions_changes(tmux, make_job):
    tmux.server.run("new-session", "-d", "-s", "mine")
    scopes = (
        ("-s",),
        ("-g",),
        ("-gw",),
        ("-t", "mine"),
        ("-w", "-t", "mine"),
        ("-p", "-t", "mine"),
    )
    before = [tmux.server.run("show-options", *scope).stdout for scope in scopes]
    job = make_job("pass")
    end_of(tmux, tmux.launch(job), job)
    assert [tmux.server.run("show-options", *scope).stdout for scope in scopes] == before


def test_a_users_destroy_unattached_does_not_end_runs(tmux, make_job):
    tmux.server.run("new-session", "-d", "-s", "mine", ";", "set", "-g", "destroy-unattached", "on")
    job = make_job(SLEEP)
    handle = tmux.launch(job)
    start_of(job)
    with somebody_attached(tmux, job.name):
        pass
    assert job.name in sessions(tmux)
    assert tmux.poll(handle, job.folder) is None


def test_a_missing_tmux_is_a_launch_error_with_the_remedy(tmux, make_job, monkeypatch):
    job = make_job("pass")
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "/nowhere")
        with pytest.raises(LaunchError, match=r"apt install tmux.* or use --launcher local"):
            tmux.launch(job)


def test_the_program_asks_for_tmux_before_it_schedules_anything(server_folder, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "/nowhere")
        with pytest.raises(ConfigError, match="tmux is not installed"):
            open_launcher(LaunchConfig())
        open_launcher(LaunchConfig(launcher="local"))


def test_a_session_without_its_options_is_no_launch(tmux, make_job, monkeypatch):
    monkeypatch.setattr("flowrl.launchers.tmux.RUN_OPTION", "no_such_option")
    with pytest.raises(LaunchError, match="no_such_option"):
        tmux.launch(make_job(SLEEP))
    assert sessions(tmux) == []


@pytest.mark.parametrize(
    ("words", "match"),
    [
        pytest.param("echo 'server exited unexpectedly' >&2; exit 1", None, id="once"),
        pytest.param("echo 'no space' >&2; exit 1", "no space", id="refused"),
    ],
)
def test_a_tmux_that_fails_is_tried_again_only_when_that_may_help(
    tmux, make_job, monkeypatch, tmp_path, words, match
):
    fake = program(
        tmp_path / "bin" / "tmux",
        f"if mkdir {tmp_path}/failed 2>/dev/null; then {words}; fi\n"
        'exec /usr/bin/env PATH="${PATH#*:}" tmux "$@"',
    )
    monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")
    job = make_job("pass")
    if match is not None:
        with pytest.raises(LaunchError, match=match):
            tmux.launch(job)
        assert sessions(tmux) == []
    assert isinstance(end_of(tmux, tmux.launch(job), job), Finished)


def test_a_server_without_a_session_takes_the_first(tmux, make_job):
    tmux.server.run("new-session", "-d", "-s", "mine", ";", "set-option", "-s", "exit-empty", "off")
    tmux.server.run("kill-session", "-t", "=mine")
    job = make_job(SLEEP)
    tmux.launch(job)
    assert sessions(tmux) == [job.name]


def test_a_socket_may_be_a_path(server_folder: Path, make_job):
    tmux = TmuxLauncher(str(server_folder / "socket"))
    job = make_job(SUCCEED % "e0.a1.x")
    handle = tmux.launch(job)
    assert isinstance(end_of(tmux, handle, job), Finished)
    until(lambda: tmux.close() or not process.start_time_of(handle.server_pid or 0))


def test_a_run_does_not_mind_its_users(tmux, make_job):
    """They rename its session, attach to it, type into it and look at older lines."""
    job = make_job("print(*range(999))\n" + SLEEP)
    handle = tmux.launch(job)
    start = start_of(job)
    tmux.server.run("rename-session", "-t", f"={job.name}", "mine")
    tmux.server.run("split-window", "-d", "-t", "=mine:", "--", "sleep", "600")
    with somebody_attached(tmux, "mine"):
        for keys in (["exit", "Enter"], ["-l", "; kill-server"], ["C-z", "C-d", "C-s"], ["C-q"]):
            tmux.server.run("send-keys", "-t", "=mine:", *keys)
        tmux.server.run("copy-mode", "-t", "=mine:")
        tmux.server.run("resize-window", "-t", "=mine:", "-x", "20", "-y", "5")
        assert tmux.poll(handle, job.folder) is None
    assert process.alive(start.job_pid or 0, start.job_start_time)
    found = tmux.find(job)
    assert found is not None
    assert (found.session, found.pid) == ("mine", handle.pid)
    assert tmux.launch(job) == found
    for pid in (start.runner_pid, start.job_pid):
        signal_to(pid, signal.SIGCONT)
    tmux.stop(found, job.folder)
    assert cause_of(end_of(tmux, found, job)) is ExitCause.STOPPED


def test_a_socket_needs_a_folder_that_exists(tmp_path):
    TmuxLauncher(str(tmp_path / "socket")).check()
    with pytest.raises(ConfigError, match=r"nowhere/socket: its folder does not exist"):
        TmuxLauncher(str(tmp_path / "nowhere" / "socket")).check()


def test_a_socket_needs_a_path_that_fits_into_an_address(tmp_path):
    path = f"{tmp_path}/".ljust(107, "x")
    TmuxLauncher(path).check()
    with pytest.raises(ConfigError, match=r"xx is longer than the 107 bytes of a socket; choose"):
        TmuxLauncher(f"{path}x").check()


def test_a_name_of_a_socket_that_is_too_long_is_refused():
    TmuxLauncher("x" * 50).check()
    with pytest.raises(ConfigError, match=r"xx is longer than the 107 bytes of a socket; choose"):
        TmuxLauncher("x" * 200).check()


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_is_no_socket_is_refused_and_stays(tmp_path, kind):
    place = tmp_path / "mine"
    place.write_text("hi") if kind == "file" else place.mkdir()
    with pytest.raises(ConfigError, match="mine is there and is no socket; name another"):
        TmuxLauncher(str(place)).check()
    assert place.is_dir() if kind == "folder" else place.read_text() == "hi"
