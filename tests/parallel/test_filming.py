"""Films of merged skills by real processes, which delay no scheduler and outlive none."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from flowrl import notices, runs
from flowrl.errors import NameRefusedError
from flowrl.launchers.child import run_when_idle
from flowrl.parallel.filming import FILMING, Filmer
from flowrl.parallel.status import Entry, Failed
from flowrl.paths import GraphPaths, display_name
from tests.hostile_names import HOSTILE
from tests.parallel.scheduling import NOW
from tests.parallel.test_notifying import done
from tests.waiting import limit, until


@pytest.fixture
def program(tmp_path, monkeypatch):
    """A function that puts a shell script in the place of the interpreter."""

    def put(script: str) -> None:
        file = tmp_path / "python"
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o700)
        monkeypatch.setattr("flowrl.parallel.filming.sys.executable", str(file))

    return put


def archived(graph_paths: GraphPaths, skill: str, *, run_id: str = "r") -> Entry:
    """The end of a skill whose archive is that of a run: of the one that has ended, "r"."""
    plan = (runs.PlannedStep(skill=skill, count=1, expert=3),)
    facts = {"expert": 3, "attempt": 2, "experts": (3,), "ancestors": (), "config": {}}
    run = runs.TrainingRun(run_id=run_id, skill=skill, plan=plan, **facts)
    archive = graph_paths.archive(3, skill)
    archive.folder.mkdir(parents=True, exist_ok=True)
    runs.write_run(archive, run)
    return done(skill)


def test_each_completed_skill_is_filmed_and_no_other(graph_paths, tmp_path, program):
    told = tmp_path / "told"
    place = shlex.quote(str(told))
    policy = f"sleep 0.3; cut -d' ' -f41 /proc/$$/stat >> {place}"
    program(f'{policy}; printf "%s\\n" "$@" >> {place}')
    for when in ("never", "success"):
        with Filmer(when, graph_paths) as filmer:
            filmer.skill(archived(graph_paths, "Collect Wood"))
            filmer.skill(Entry(skill="B", status=Failed(attempt=3, why="x", at=NOW)))
            filmer.finish()
    policy, *words = told.read_text().splitlines()
    assert int(policy) == os.SCHED_IDLE
    play = ["-m", "flowrl.cli", "play", str(graph_paths.root), "--skill=Collect Wood", "--keep"]
    assert words == [*play, "--episodes=2"]
    assert notices.read(graph_paths) == {}


def test_any_name_arrives_as_it_is(graph_paths, tmp_path, program):
    told = tmp_path / "told"
    program(f'printf "%s\\0" "$5" >> {shlex.quote(str(told))}')
    names = [name for name in HOSTILE[::8] if _is_name(name)]
    assert len(names) > 10
    with Filmer("success", graph_paths) as filmer:
        for name in names:
            filmer.skill(archived(graph_paths, name))
        filmer.finish()
    assert told.read_text().split("\0")[:-1] == [f"--skill={name}" for name in names]


def test_a_failure_is_a_notice(graph_paths, program):
    program("echo one >&2; printf 'flowrl: no \\033[2J space' >&2; exit 74")
    with Filmer("success", graph_paths) as filmer:
        filmer.skill(archived(graph_paths, "Collect Wood"))
        filmer.finish()
    said = notices.read(graph_paths)[FILMING]
    assert (
        said
        == "no film of Collect Wood: exit code 74: flowrl: no \N{REPLACEMENT CHARACTER}[2J space"
    )


def test_leaving_ends_the_film_under_way_and_begins_no_other(graph_paths, tmp_path, program):
    begun = tmp_path / "begun"
    program(f"echo $$ >> {shlex.quote(str(begun))}; exec sleep 60")
    started = time.monotonic()
    with Filmer("success", graph_paths) as filmer:
        for name in ("Collect Wood", "Place Table"):
            filmer.skill(archived(graph_paths, name))
        assert time.monotonic() - started < limit(5), "it waits for no film"
        until(lambda: begun.exists() and begun.read_text().endswith("\n"))
    (pid,) = begun.read_text().split()
    until(lambda: not _runs(int(pid)))
    time.sleep(0.2)
    assert begun.read_text().split() == [pid]
    assert notices.read(graph_paths) == {}


def test_a_skill_that_is_merged_anew_is_filmed_once_its_new_run_is_archived(
    graph_paths, tmp_path, program
):
    begun = tmp_path / "begun"
    program(f"echo >> {shlex.quote(str(begun))}")
    with Filmer("success", graph_paths) as filmer:
        filmer.skill(archived(graph_paths, "Collect Wood", run_id="earlier"))
        time.sleep(0.7)
        assert not begun.exists()
        archived(graph_paths, "Collect Wood")
        filmer.finish()
    assert begun.exists()


def test_leaving_lets_the_film_end_the_session_that_it_has_started(graph_paths, tmp_path, program):
    begun = tmp_path / "begun"
    script = f"setsid sh -c 'echo $$ >> {shlex.quote(str(begun))}; exec sleep 60' &"
    program(f'{script} trap "kill $!; exit" TERM; wait')
    with Filmer("success", graph_paths) as filmer:
        filmer.skill(archived(graph_paths, "Collect Wood"))
        until(lambda: begun.exists() and begun.read_text().endswith("\n"))
    until(lambda: not _runs(int(begun.read_text())), seconds=5)


def _is_name(name: str) -> bool:
    with suppress(NameRefusedError):
        return display_name(name) == name
    return False


def _runs(pid: int) -> bool:
    try:
        return "zombie" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_a_graph_that_is_removed_meanwhile_is_not_made_again(graph_paths, program):
    program(f"rm -rf {shlex.quote(str(graph_paths.root))}; exit 1")
    with Filmer("success", graph_paths) as filmer:
        filmer.skill(archived(graph_paths, "Collect Wood"))
        filmer.finish()
    assert not graph_paths.root.exists()


def test_what_makes_films_leaves_the_processors_to_sessions_of_trainers():
    child = subprocess.Popen(
        [sys.executable, "-c", "import subprocess, sys; subprocess.run(['sleep', '60'])"],
        start_new_session=True,
    )
    try:
        run_when_idle(child.pid)
        assert os.sched_getscheduler(child.pid) == os.SCHED_IDLE
        path = Path(f"/proc/{child.pid}/autogroup")
        if path.exists():
            assert path.read_text().endswith("nice 19\n")
    finally:
        child.kill()
        child.wait()
