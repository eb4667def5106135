"""Hostile names go the whole way of a skill: each is refused in one line, or harmless all along."""

from __future__ import annotations

import ast
import json
import os
import re
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl import cli, storage
from flowrl.errors import NameRefusedError
from flowrl.launchers.base import Job
from flowrl.launchers.local import LocalLauncher
from flowrl.launchers.tmux import TmuxLauncher
from flowrl.parallel.events import RunRequest
from flowrl.parallel.scheduler import SkillScheduler
from flowrl.parallel.state import check_new_skills
from flowrl.parallel.status import Entry
from flowrl.paths import GraphPaths, RunPaths, display_name, session_name, slug
from flowrl.skills.graph import SkillGraph
from tests.hostile_names import CANARY, HOSTILE, TMUX
from tests.parallel.making import finish, make_skill, merge_finished, prepare
from tests.parallel.scheduling import QuietBackend

TRAINER = """
import json, os, sys
folder, run_id = sys.argv[1:]
result = {"format": 1, "run_id": run_id, "frames": 3, "success_rate": 1.0, "step_success": [1.0],
  "mean_episode_length": 2.0, "updates": 1, "wall_seconds": 0.1, "stopped_early": False,
  "experts": []}
print("training", os.path.basename(folder))
with open(os.path.join(folder, "result.json"), "w") as file:
    json.dump(result, file)
"""


class NamedRuns(QuietBackend):
    """Real folders, sessions and processes; a merge only moves the log to the archive."""

    def __init__(self, graph_paths: GraphPaths) -> None:
        self.graph_paths = graph_paths

    def prepare(self, task: RunRequest) -> Job:
        run_id = f"e{task.expert}.a{task.attempt}.{secrets.token_hex(4)}"
        run_paths = self.graph_paths.run(task.expert, task.skill)
        storage.make_dir(run_paths.folder)
        return self._job(task, run_id)

    def resume(self, task: RunRequest) -> Job:
        raise AssertionError("no run is stopped here")

    def reopen(self, task: RunRequest) -> Job | None:
        return self._job(task, task.run_id or "")

    def merge(self, task: RunRequest) -> Mapping[str, Any]:
        archive = self.graph_paths.skill_folder(task.expert, task.skill)
        storage.make_dir(archive)
        run_paths = self.graph_paths.run(task.expert, task.skill)
        storage.copy_file(run_paths.training_log, RunPaths(archive, task.expert).training_log)
        storage.remove_tree(run_paths.folder)
        return {"run_id": task.run_id}

    def discard(self, task: RunRequest) -> None:
        raise AssertionError(f"{task.skill!r} has failed")

    def _job(self, task: RunRequest, run_id: str) -> Job:
        folder = self.graph_paths.run(task.expert, task.skill).folder
        return Job(
            name=session_name(task.expert, task.skill),
            run_id=run_id,
            argv=(sys.executable, "-I", "-S", "-c", TRAINER, str(folder), run_id),
            env={"PATH": os.defpath, "NAME": task.skill, "LANG": "C.UTF-8"},
            cwd=folder,
            folder=folder,
        )


@pytest.fixture
def world(tmp_path, monkeypatch) -> Path:
    """A folder to work in, beside the graph: whatever escapes, escapes to here."""
    for name in ("here", "home"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path


def add_all(scheduler: SkillScheduler, names: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Who is taken in, and why the others are refused."""
    refused: dict[str, str] = {}
    for name in names:
        try:
            scheduler.add_skill(name)
        except NameRefusedError as error:
            refused[name] = str(error)
    return list(scheduler.state.entries), refused


def train_all(world: Path, names: Sequence[str], launcher) -> list[str]:
    """The names that were trained, all the way from `add_skill` to the archive."""
    graph_paths = GraphPaths(world / "graph")
    with SkillScheduler(
        graph_paths.root, launcher=launcher, max_parallel_skills=8, max_retries=0
    ) as scheduler:
        scheduler.set_callbacks(backend=NamedRuns(graph_paths))
        taken, _ = add_all(scheduler, names)
        assert scheduler.run().complete
    for number, name in enumerate(taken):
        log = graph_paths.skill_folder(number, name) / "training.log"
        assert log.read_text() == f"training skill_{number}_{slug(name)}\n".replace(
            "\n", os.linesep
        )
    return taken


def check_that_nothing_escaped(world: Path) -> None:
    assert not list(world.rglob(CANARY))
    assert sorted(path.name for path in world.iterdir()) == ["graph", "here", "home"]
    assert list((world / "here").iterdir()) == []
    assert {path.name for path in (world / "home").iterdir()} <= {"socket"}
    for path in (world / "graph").rglob("*"):
        assert re.fullmatch(r"[A-Za-z0-9_.][A-Za-z0-9_.-]*", path.name), path
        assert not path.is_symlink()


def check_status(world: Path, capsys, names: Sequence[str]) -> None:
    """Every name is shown, letter by letter, and no terminal is told anything."""
    assert cli.main(["status", str(world / "graph"), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["skills"]
    assert [row["skill"] for row in rows] == list(names)
    assert cli.main(["status", str(world / "graph")]) == 0
    shown = capsys.readouterr().out
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", shown)
    for name in names:
        if len(name) < 40:
            assert name in shown


def test_there_are_enough_names():
    assert len(set(HOSTILE)) >= 200


def test_every_name_is_refused_in_one_line_or_taken_under_a_harmless_one(world):
    with SkillScheduler(world / "graph", launcher=LocalLauncher()) as scheduler:
        taken, refused = add_all(scheduler, HOSTILE)
    assert len(taken) >= 150
    assert len(refused) >= 40
    for name, why in refused.items():
        assert why.isprintable(), f"{name!r}: {why!r}"
        assert len(why) < 600
    slugs = [slug(name) for name in taken]
    assert len({word.casefold() for word in slugs}) >= len(slugs) - 3, "A b and a b, CON and con"
    assert len(set(slugs)) == len(slugs)
    for word in slugs:
        assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_]{0,63}", word), word
    check_that_nothing_escaped(world)


@pytest.mark.parametrize("step", [9, pytest.param(1, marks=pytest.mark.slow)], ids=["some", "all"])
def test_hostile_names_are_trained_like_others(world, capsys, step):
    launcher = LocalLauncher()
    taken = train_all(world, HOSTILE[::step], launcher)
    check_that_nothing_escaped(world)
    check_status(world, capsys, taken)


@pytest.mark.tmux
def test_hostile_names_are_harmless_sessions(world, capsys):
    names = [*TMUX[:3], "; kill-server", "a;", "-t", "$(id)", "../../x"]
    socket = world / "home" / "socket"
    tmux = TmuxLauncher(str(socket))
    try:
        taken = train_all(world, names, tmux)
        assert taken == names
        check_that_nothing_escaped(world)
        check_status(world, capsys, taken)
    finally:
        tmux.server.run("kill-server")


def test_hostile_names_are_prepared_merged_and_archived(world):
    """By the real backend's parts: what is generated is one module, whatever its skill's name."""
    names = [
        '"""',
        f"$(touch {CANARY})",
        "../../x",
        "\\N{DIGIT ONE}",
        "{0.__class__}",
        "木を集める",
    ]
    graph_paths = GraphPaths(world / "graph")
    for number, name in enumerate(names):
        skill = make_skill(name, gain=f"thing{number}")
        ready = prepare(graph_paths, name, number, {}, graph=SkillGraph([skill]))
        tree = ast.parse(ready.run_paths.module.read_text())
        kinds = {type(node).__name__ for node in tree.body}
        assert kinds <= {"Expr", "Assign", "AnnAssign", "FunctionDef", "Import", "ImportFrom"}
        finish(ready.run_paths, {number: 100})
    merged, refused = merge_finished(graph_paths)
    assert {summary["skill"] for summary in merged} == set(names), refused
    for number, name in enumerate(names):
        assert (graph_paths.skill_folder(number, name) / "run.json").is_file()
    check_that_nothing_escaped(world)


NAMES = st.text(max_size=80) | st.sampled_from(HOSTILE) | st.text("aA_ .-/", max_size=6)


@given(names=st.lists(NAMES, max_size=6))
def test_slugs_are_one_to_one_or_refused(names):
    """Whoever is admitted together has folders of their own."""
    admitted: dict[str, str] = {}
    for text in names:
        try:
            name = display_name(text)
            if name in admitted.values():
                continue
            known = {n: Entry(skill=n, needs=()) for n in admitted.values()}
            check_new_skills([Entry(skill=name)], known)
        except NameRefusedError:
            continue
        word = slug(name)
        assert word not in admitted
        assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_]{0,63}", word)
        assert word.casefold() not in {"con", "nul", "aux", "prn"}
        assert GraphPaths(Path("g")).run(0, name).folder.parent == Path("g/training_runs")
        admitted[word] = name


def admitted_or_why(name: str) -> str:
    """The name as people see it, or why it is refused: one line in either case."""
    try:
        return display_name(name)
    except NameRefusedError as error:
        return str(error)


@given(NAMES)
def test_a_name_or_its_refusal_can_be_printed(name):
    assert admitted_or_why(name).isprintable()


@given(NAMES)
def test_a_name_that_was_admitted_stays_as_it_is(name):
    shown = admitted_or_why(name)
    assert admitted_or_why(shown) == shown or len(shown) > 200
