"""How the files of a run are judged, without processes."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from flowrl.launchers import files, processes
from flowrl.launchers.job import Exited, Handle, Lost, Outcome, Why

RUN = "e1.a1.x"
BIRTH = f"{processes.boot_id()}:1"
DEAD = Handle(run_id=RUN, session="s", pid=2**22 - 1, birth=BIRTH, server_pid=2**22 - 2)


def recorded(folder: Path, **facts) -> Outcome | None:
    plain = {"format": 1, "run_id": RUN, "code": None, "signal": None, "oom": False}
    document = plain | {"asked_by": [], "detail": "", "ended_at": 0.0} | facts
    (folder / "exit.json").write_text(json.dumps(document))
    return files.outcome(DEAD, folder)


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        pytest.param({"signal": 9, "oom": True}, Why.OOM, id="out of memory"),
        pytest.param({"signal": 9, "oom": True, "asked_by": ["int"]}, Why.OOM, id="after Ctrl-C"),
        pytest.param({"signal": 9, "asked_by": ["int"]}, Why.SIGNAL, id="killed after Ctrl-C"),
        pytest.param({"signal": 2}, Why.INTERRUPTED, id="SIGINT"),
        pytest.param({"code": 1, "asked_by": ["int"]}, Why.INTERRUPTED, id="exit 1 by Ctrl-C"),
        pytest.param({"code": 0, "asked_by": ["quit"]}, Why.INTERRUPTED, id="exit 0 by Ctrl-\\"),
        pytest.param({"signal": 9, "asked_by": ["term"]}, Why.STOPPED, id="after the grace"),
        pytest.param({"code": 1, "asked_by": ["hup", "term"]}, Why.STOPPED, id="shutdown"),
        pytest.param({"code": 85, "asked_by": ["hup"]}, Why.SESSION_KILLED, id="session"),
        pytest.param({"code": 85, "asked_by": ["hup", "server"]}, Why.SERVER_KILLED, id="server"),
        pytest.param({"code": 1}, Why.EXIT, id="exit 1"),
        pytest.param({"code": 0}, Why.NO_RESULT, id="exit 0"),
    ],
)
def test_an_end_has_one_reason(tmp_path, facts, why):
    outcome = recorded(tmp_path, **facts)
    assert isinstance(outcome, Exited)
    assert outcome.why is why
    assert outcome.detail


def test_a_hangup_without_tmux_is_a_stop(tmp_path):
    recorded(tmp_path, code=1, asked_by=["hup"])
    outcome = files.outcome(replace(DEAD, server_pid=None), tmp_path)
    assert isinstance(outcome, Exited)
    assert outcome.why is Why.STOPPED


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"format": 1}', '{"format": 2, "run_id": "e1.a1.x", "code": 0}', "\0"],
)
@pytest.mark.parametrize("name", ["exit.json", "start.json"])
def test_a_torn_file_is_no_file(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    assert isinstance(files.outcome(DEAD, tmp_path), Lost)


def test_the_end_of_another_run_is_not_this_runs(tmp_path):
    assert isinstance(recorded(tmp_path, run_id="e1.a0.y", code=1), Lost)


def test_a_living_runner_without_files_is_starting(tmp_path):
    birth = processes.birth_of(os.getpid())
    handle = Handle(run_id=RUN, session="s", pid=os.getpid(), birth=birth)
    assert files.outcome(handle, tmp_path) is None


def test_a_pid_without_its_birth_is_nobody():
    assert processes.alive(os.getpid(), processes.birth_of(os.getpid()))
    assert not processes.alive(os.getpid(), "")
    assert not processes.alive(os.getpid(), f"{processes.boot_id()}:1")


def test_a_zombie_does_not_live():
    pid = os.posix_spawn("/bin/true", ["true"], {})
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert not processes.birth_of(pid)
    os.waitpid(pid, 0)


def test_whoever_cannot_look_does_not_say_that_a_process_is_gone(monkeypatch):
    def refuse(*_args, **_facts):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(OSError, match="Too many open files"):
        processes.birth_of(os.getpid())
