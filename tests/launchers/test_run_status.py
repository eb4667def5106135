"""What the files of a run mean, without processes."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from flowrl.launchers import process, run_status
from flowrl.launchers.base import ExitCause, Exited, Handle, Lost, Outcome

RUN = "e1.a1.x"
BIRTH = f"{process.boot_id()}:1"
DEAD = Handle(run_id=RUN, session="s", pid=2**22 - 1, start_time=BIRTH, server_pid=2**22 - 2)


def recorded(folder: Path, **facts) -> Outcome | None:
    plain = {"format": 1, "run_id": RUN, "code": None, "signal": None, "oom": False}
    document = plain | {"received": [], "detail": "", "ended_at": 0.0} | facts
    (folder / "exit.json").write_text(json.dumps(document))
    return run_status.outcome(DEAD, folder)


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        pytest.param({"signal": 9, "oom": True}, ExitCause.OOM, id="out of memory"),
        pytest.param(
            {"signal": 9, "oom": True, "received": ["SIGINT"]}, ExitCause.OOM, id="after Ctrl-C"
        ),
        pytest.param(
            {"signal": 9, "received": ["SIGINT"]}, ExitCause.SIGNAL, id="killed after Ctrl-C"
        ),
        pytest.param({"signal": 2}, ExitCause.INTERRUPTED, id="SIGINT"),
        pytest.param(
            {"code": 1, "received": ["SIGINT"]}, ExitCause.INTERRUPTED, id="exit 1 by Ctrl-C"
        ),
        pytest.param(
            {"code": 0, "received": ["SIGQUIT"]}, ExitCause.INTERRUPTED, id="exit 0 by Ctrl-\\"
        ),
        pytest.param(
            {"signal": 9, "received": ["SIGTERM"]}, ExitCause.STOPPED, id="after the grace"
        ),
        pytest.param(
            {"code": 1, "received": ["SIGHUP", "SIGTERM"]}, ExitCause.STOPPED, id="shutdown"
        ),
        pytest.param({"code": 85, "received": ["SIGHUP"]}, ExitCause.SESSION_KILLED, id="session"),
        pytest.param(
            {"code": 85, "received": ["SIGHUP", "server ended"]},
            ExitCause.SERVER_KILLED,
            id="server",
        ),
        pytest.param({"code": 1}, ExitCause.EXIT, id="exit 1"),
    ],
)
def test_an_end_has_one_reason(tmp_path, facts, why):
    outcome = recorded(tmp_path, **facts)
    assert isinstance(outcome, Exited)
    assert outcome.cause is why
    assert outcome.detail


def test_a_hangup_without_tmux_is_a_stop(tmp_path):
    recorded(tmp_path, code=1, received=["SIGHUP"])
    outcome = run_status.outcome(replace(DEAD, server_pid=None), tmp_path)
    assert isinstance(outcome, Exited)
    assert outcome.cause is ExitCause.STOPPED


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"format": 1}', '{"format": 2, "run_id": "e1.a1.x", "code": 0}', "\0"],
)
@pytest.mark.parametrize("name", ["exit.json", "start.json"])
def test_a_torn_file_is_no_file(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    assert isinstance(run_status.outcome(DEAD, tmp_path), Lost)


def test_the_end_of_another_run_is_not_this_runs(tmp_path):
    assert isinstance(recorded(tmp_path, run_id="e1.a0.y", code=1), Lost)


def test_a_living_runner_without_files_is_starting(tmp_path):
    start_time = process.start_time_of(os.getpid())
    handle = Handle(run_id=RUN, session="s", pid=os.getpid(), start_time=start_time)
    assert run_status.outcome(handle, tmp_path) is None
