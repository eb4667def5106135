"""Notifications by real commands: also hostile ones never delay the scheduler, nor end it."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import time
from pathlib import Path

import pytest

from flowrl import notices
from flowrl.errors import ConfigError
from flowrl.parallel.notifying import FAILURE, Notifier
from flowrl.parallel.status import Completed, Entry, Failed
from flowrl.paths import GraphPaths
from tests.hostile_names import HOSTILE
from tests.parallel.scheduling import NOW
from tests.waiting import limit


@pytest.fixture
def graph_paths(graph_paths: GraphPaths) -> GraphPaths:
    """A graph whose folder is there: a notice makes none."""
    graph_paths.root.mkdir()
    return graph_paths


def python(code: str, *words: object) -> str:
    return shlex.join([sys.executable, "-c", code, *map(str, words)])


def keeping(file: Path) -> str:
    """A command that appends its standard input to a file."""
    return python("import sys; open(sys.argv[1], 'ab').write(sys.stdin.buffer.read())", file)


def lines_of(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_bytes().splitlines()]


def done(skill: str) -> Entry:
    status = Completed(
        attempt=2, run_id="r", frames=9, success_rate=0.5, wall_seconds=1.0, at=NOW, why=""
    )
    return Entry(skill=skill, expert=3, status=status)


def test_each_end_is_one_line_of_json(graph_paths, tmp_path):
    with Notifier(keeping(tmp_path / "told"), graph_paths) as notifier:
        notifier.skill(done("Collect Wood"))
        notifier.skill(Entry(skill="B", status=Failed(attempt=3, why="x" * 9999, at=NOW)))
    with Notifier(keeping(tmp_path / "told"), graph_paths) as notifier:
        notifier.tell("ended", exit_code=1)
    *both, last = lines_of(tmp_path / "told")
    first, second = sorted(both, key=lambda line: line["event"])
    facts = {"skill": "Collect Wood", "expert": 3, "attempt": 2, "success_rate": 0.5, "frames": 9}
    assert first == {"event": "completed", "graph": str(graph_paths.root), **facts, "why": ""}
    assert second["event"] == "failed"
    assert len(second["why"]) == 500
    assert (last["event"], last["exit_code"]) == ("ended", 1)
    assert notices.read(graph_paths) == {}


def test_any_name_arrives_as_it_is_and_no_shell_reads_it(graph_paths, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = HOSTILE[::8]
    with Notifier(keeping(tmp_path / "told"), graph_paths) as notifier:
        for name in names:
            notifier.tell("completed", skill=name)
    assert sorted(line["skill"] for line in lines_of(tmp_path / "told")) == sorted(names)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["graph", "told"]


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import sys; sys.exit(3)", "ended with exit code 3"),
        ("import os; os.kill(os.getpid(), 9)", "ended with exit code -9"),
        ("import os; os.close(0); os._exit(7)", "ended with exit code 7"),
        ("import time; time.sleep(600)", "was ended after 1 seconds"),
        ("import signal, time; signal.signal(15, lambda *_: 0); time.sleep(600)", "after 1 sec"),
        ("while True: print('x' * 65536)", "was ended after 1 seconds"),
    ],
    ids=["fails", "is killed", "reads nothing", "hangs", "hangs on", "floods"],
)
def test_a_command_that_fails_is_a_notice(graph_paths, code, said, capfd):
    before = time.monotonic()
    with Notifier(python(code), graph_paths, limit_seconds=1.0) as notifier:
        notifier.tell("ended")
        assert time.monotonic() - before < limit(0.5), "the loop goes on"
    assert said in notices.read(graph_paths)[FAILURE]
    assert capfd.readouterr().out == ""


def test_what_a_hanging_command_has_started_is_ended_too(graph_paths, tmp_path):
    code = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "open(sys.argv[1], 'w').write(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    with Notifier(python(code, tmp_path / "pid"), graph_paths, limit_seconds=2.0) as notifier:
        notifier.tell("ended")
    pid = int((tmp_path / "pid").read_text())
    for _ in range(100):
        state = Path(f"/proc/{pid}/stat")
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    os.kill(pid, 9)
    pytest.fail("it lives on")


def test_many_ends_at_once_wait_for_one_another_and_are_bounded(graph_paths):
    hanging = python("import time; time.sleep(600)")
    before = time.monotonic()
    with Notifier(hanging, graph_paths, limit_seconds=0.5) as notifier:
        for number in range(1000):
            notifier.tell("completed", skill=str(number))
        assert time.monotonic() - before < limit(1)
    assert time.monotonic() - before < limit(5)


@pytest.mark.parametrize("command", ["/nonexistent/x", "no_such_program_xyz -v", "'open", " ", "/"])
def test_a_command_that_cannot_be_run_is_refused(graph_paths, command):
    with pytest.raises(ConfigError, match=r"--notify .*(name one on PATH|close the quotes)"):
        Notifier(command, graph_paths)


def test_a_program_that_has_gone_meanwhile_is_a_notice(graph_paths, tmp_path):
    program = tmp_path / "tell"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    with Notifier(str(program), graph_paths) as notifier:
        program.unlink()
        notifier.tell("ended")
    assert "cannot be started: " in notices.read(graph_paths)[FAILURE]


@pytest.mark.parametrize("sign", ["|", "||", "&", "&&", ";", ">", ">>", "<", "2>", "2>&1"])
def test_a_sign_that_only_a_shell_obeys_is_refused(tmp_path, sign):
    with pytest.raises(ConfigError, match=re.escape(f"has {sign}, but no shell runs it")):
        Notifier(f"cat {sign} told", GraphPaths(tmp_path))
    Notifier(f"sh -c 'cat {sign} told'", GraphPaths(tmp_path))
    assert list(tmp_path.iterdir()) == []
