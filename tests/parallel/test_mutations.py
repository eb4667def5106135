"""Records that are valid JSON, sealed, and not what flowrl wrote: refused in a line, or taken.

A state, a manifest or a run's record is changed in its structure and sealed again, as a hostile or
a careless hand would. `status`, `fsck` and a start then say what is wrong; none ends by an error
that is not flowrl's own, and no log holds a traceback.
"""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from flowrl import bottomup_parallel, cli
from flowrl.errors import LaunchError
from flowrl.launchers.base import Handle, Job
from flowrl.launchers.launcher import Launcher
from flowrl.parallel import start
from flowrl.parallel.scheduler import SkillScheduler
from flowrl.parallel.state import SchedulerState, StateFile
from flowrl.parallel.status import (
    Blocked,
    Completed,
    Entry,
    Failed,
    Held,
    Merging,
    Running,
    Waiting,
)
from flowrl.paths import GraphPaths
from flowrl.storage import records
from tests.parallel.making import PICKAXE, SWORD, TABLE, WOOD, finish, prepare, train
from tests.parallel.scheduling import state_of_entries

NOW = datetime(2030, 1, 1, tzinfo=UTC)
RUN = "training_runs/skill_2_Make_Wood_Pickaxe"
FILES = ("scheduler_state.json", "checkpoints/global_latest.json", f"{RUN}/run.json")
ODD = (
    *(None, True, False, 0, -1, 1, 1.5, 2**63, 10**400, float("inf"), float("nan"), 1e308),
    *("", "x", "\x1b[2J", "\ud800", "../../x", "\0", "9" * 400, "2030-01-01", "a" * 5000),
    *([], {}, [[]], {"": {}}, [None], {"kind": "running"}, "running", "completed", WOOD, SWORD),
    json.loads("[" * 200 + "]" * 200),
)


class Refusing(Launcher):
    """Starts nothing."""

    def _start(self, job: Job) -> Handle:
        raise LaunchError("nothing is started here")


def state() -> SchedulerState:
    """Every status, with all of its fields."""
    ids = {"run_id": "e3.a1.xx", "attempt": 1}
    handle = Handle(run_id="e2.a1.x", session="flowrl_e2", pid=2**22, start_time="b:1", pane="%1")
    figures = {"frames": 50, "success_rate": 0.5, "wall_seconds": 3.0}
    statuses = {
        WOOD: Completed(run_id="e0.a1.x", attempt=1, at=NOW, **figures),
        TABLE: Completed(run_id="e1.a1.x", attempt=1, at=NOW, goal=0.9, budget=100, **figures),
        PICKAXE: Running(run_id="e2.a1.x", attempt=2, handle=handle, devices=("0",), since=NOW),
        SWORD: Merging(**ids, **figures, since=NOW, not_before=NOW, why="later"),
        "Collect Sapling": Failed(why="exit 1", attempt=3, at=NOW, log=("a", "b")),
        "Place Plant": Blocked(blocked_by=("Collect Sapling",), why="train-more"),
        "Eat Cow": Held(why="paused", attempt=1, at=NOW, run_id="e6.a1.x"),
        "Wake Up": Waiting(attempt=2, not_before=NOW, why="exit 1", alone=True),
    }
    needs = {TABLE: (WOOD,), PICKAXE: (WOOD, TABLE), SWORD: (WOOD, TABLE)}
    needs["Place Plant"] = ("Collect Sapling",)
    entries = [
        Entry(skill=skill, needs=needs.get(skill, ()), status=status, expert=order)
        for order, (skill, status) in enumerate(statuses.items())
    ]
    return state_of_entries(entries, next_expert=len(entries))


@pytest.fixture(scope="module")
def whole() -> Iterator[Path]:
    """A graph with two merged experts, two live runs, one of them finished, and the state above."""
    memory = Path("/dev/shm")
    place = memory if os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=place) as folder:
        graph_paths = GraphPaths(Path(folder) / "whole")
        train(graph_paths, WOOD, 0, {}, acted={0: 50})
        train(graph_paths, TABLE, 1, {WOOD: 0}, acted={1: 20})
        prepare(graph_paths, PICKAXE, 2, {WOOD: 0, TABLE: 1})
        finish(prepare(graph_paths, SWORD, 3, {WOOD: 0, TABLE: 1}).run_paths, {0: 1, 3: 10})
        StateFile(graph_paths.scheduler_state).save(state())
        yield graph_paths.root


@pytest.fixture
def quiet(monkeypatch):
    """A start makes a few rounds and launches nothing."""

    def rounds(scheduler: SkillScheduler) -> SchedulerState:
        for hours in range(3):
            scheduler.tick(NOW + timedelta(hours=hours))
        return scheduler.state

    monkeypatch.setattr(SkillScheduler, "run", rounds)
    monkeypatch.setattr(start, "open_launcher", lambda _: Refusing())
    monkeypatch.delenv("FLOWRL_GRAPH", raising=False)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container below a JSON value with each of its keys."""
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from places(value[key])


def mutate(document: dict[str, Any], chance: random.Random) -> None:
    """Change one place of a document in its structure."""
    found = [place for place in places(document) if place[1] not in ("format", "sha256")]
    container, key = chance.choice(found)
    other, elsewhere = chance.choice(found)
    match chance.randrange(6):
        case 0:
            del container[key]
        case 1:
            container[key] = copy.deepcopy(other[elsewhere])
        case 2 if isinstance(container, dict):
            container[chance.choice(["x", "", "kind", "why", "\x1b[2J", key * 2])] = container[key]
        case 3 if isinstance(container, list):
            container.append(copy.deepcopy(container[key]))
        case 4:
            container[key] = [container[key]] if chance.random() < 0.5 else {"x": container[key]}
        case _:
            container[key] = copy.deepcopy(chance.choice(ODD))


def reseal(path: Path, document: dict[str, Any]) -> None:
    """Write a document as flowrl would, with a checksum or seal that holds."""
    if path.name != "scheduler_state.json":
        path.write_text(json.dumps(records.sealed(document)))
        return
    rest = json.dumps({key: document[key] for key in document.keys() - {"format", "crc32"}})[1:]
    head = f'{{"format": 1, "crc32": "{zlib.crc32(rest.encode()):08x}",\n'
    path.write_text(head + rest)


def mistakes(root: Path, capsys, caplog) -> list[str]:
    """The command lines that end by an error that is not flowrl's own."""
    graph, found = str(root), []
    target = ("--target_skill", PICKAXE, "--sandbox=none", "--launcher=local")
    commands = {
        "status": lambda: cli.main(["status", graph]),
        "status --json": lambda: cli.main(["status", graph, "--json"]),
        "fsck": lambda: cli.main(["fsck", graph]),
        "start": lambda: bottomup_parallel.main(["--graph_path", graph, *target]),
    }
    for name, command in commands.items():
        try:
            command()
            said = capsys.readouterr()
            if "Traceback" in said.err + said.out + caplog.text:
                found.append(f"{name}: {(said.err + caplog.text)[-2000:]}")
            elif name == "status" and "\x1b" in said.out:
                found.append(f"{name}: a terminal escape in {said.out!r:.2000}")
        except Exception as error:  # noqa: BLE001 - it is what is looked for
            found.append(f"{name}: {type(error).__name__}: {error!s:.300}")
        caplog.clear()
    return found


@pytest.mark.parametrize(
    "count", [20, pytest.param(2000, marks=[pytest.mark.slow, pytest.mark.timeout(3000)])]
)
@pytest.mark.parametrize("name", FILES)
def test_a_sealed_record_of_another_structure_ends_in_no_traceback(
    whole, quiet, capsys, caplog, name, count
):
    found = {}
    for seed in range(count if name == FILES[0] else count // 2):
        chance = random.Random(seed)
        root = whole.with_name(f"graph{seed}")
        shutil.copytree(whole, root)
        document = json.loads((root / name).read_text())
        for _ in range(chance.choice([1, 1, 2])):
            mutate(document, chance)
        reseal(root / name, document)
        if wrong := mistakes(root, capsys, caplog):
            found[seed] = wrong
        shutil.rmtree(root)
    assert found == {}
