"""A tmux server that does not answer: nobody waits for it, and nothing comes of it later."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from flowrl.errors import LaunchError
from flowrl.launchers import run_status
from flowrl.launchers.base import Finished, Handle
from flowrl.launchers.tmux import TmuxLauncher
from tests.launchers.conftest import SLEEP, SUCCEED, end_of, signal_to, start_of, until
from tests.launchers.tmux_sessions import sessions
from tests.waiting import limit

pytestmark = pytest.mark.tmux


@contextmanager
def frozen(handle: Handle) -> Iterator[None]:
    """A server that is stopped, and a launcher that does not wait long for it meanwhile."""
    signal_to(handle.server_pid, signal.SIGSTOP)
    try:
        with pytest.MonkeyPatch.context() as impatient:
            impatient.setattr("flowrl.launchers.tmux.REPLY_SECONDS", 2.0)
            yield
    finally:
        signal_to(handle.server_pid, signal.SIGCONT)


def test_a_frozen_server_is_a_launch_error_with_the_remedy(tmux, make_job):
    other = tmux.launch(make_job(SLEEP, name="flowrl_e1_x"))
    job = make_job(SLEEP)
    with frozen(other), pytest.raises(LaunchError, match=r"does not answer.*kill -CONT"):
        tmux.launch(job)
    handle = tmux.launch(job)
    start_of(job)
    assert tmux.poll(handle, job.folder) is None


def test_a_launch_that_was_given_up_starts_nothing_later(tmux, make_job, monkeypatch):
    other = tmux.launch(make_job(SLEEP, name="flowrl_e1_x"))
    job = make_job(SLEEP)
    with monkeypatch.context() as patch:
        patch.setattr(tmux.server, "panes", lambda: [])  # it freezes after the look
        with frozen(other), pytest.raises(LaunchError, match="does not answer"):
            tmux.launch(job)
    until(lambda: job.name in sessions(tmux))  # the server carries it out now
    late = "#{pane_dead}"
    until(lambda: tmux.server.run("list-panes", "-t", f"={job.name}:", "-F", late).stdout == "1\n")
    assert not run_status.lock_held(job.folder)
    assert not (job.folder / "ready").exists()
    tmux.launch(job)
    start_of(job)
    assert sorted(sessions(tmux)) == [job.name, "flowrl_e1_x"]


def test_ends_are_heard_while_the_server_is_frozen(server_folder, make_job):
    tmux = TmuxLauncher("test")
    keeper = make_job(SLEEP, name="flowrl_e9_x")
    other = tmux.launch(keeper)
    ids = [f"e{n}.a1.x" for n in range(3)]
    jobs = [make_job(SUCCEED % name, name=f"flowrl_{name[:2]}_x", run_id=name) for name in ids]
    runs = [(tmux.launch(job), job) for job in jobs]
    for job in jobs:
        until((job.folder / "exit.json").exists)
    with frozen(other):
        for handle, job in runs:
            assert isinstance(end_of(tmux, handle, job), Finished)
        began = time.monotonic()
        tmux.wait([other], timeout_seconds=0.0)
        tmux.close()
        assert time.monotonic() - began < limit(3.0), "it waited for the server"
    until(lambda: tmux.wait([], timeout_seconds=0) or sessions(tmux) == [keeper.name])
