"""The parallel story with stand-in trainers: `python -m tests.parallel.stand_in_story FLAGS`.

All but the trainer is real: the command line, the flow, the daemon, the launchers, the merges.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flowrl import bottomup_parallel, storage
from flowrl.config import BottomUpConfig
from flowrl.experts import array_check
from flowrl.experts.array_check import ArrayReport
from flowrl.experts.store import ExpertStore
from flowrl.launchers import sandbox
from flowrl.launchers.base import Job
from flowrl.launchers.sandbox import Confinement
from flowrl.parallel import analysing, scheduler, skill_sources, training, training_backend
from flowrl.parallel.events import RunRequest
from flowrl.parallel.training_backend import TrainingBackend
from flowrl.parallel.training_setup import PreparedRun
from flowrl.paths import GraphPaths
from flowrl.runs import Shapes
from tests.experts.making import SHAPES, content_digest, is_whole
from tests.waiting import limit

ROOT = Path(__file__).parents[2]
DEADLINE_SECONDS = limit(120.0)
REAL_READERS = "REAL_READERS"  # set for daemons that read arrays as users' do
LOOK_SECONDS = 0.1  # between two looks for requests; a user waits up to a second


class StandInBackend(TrainingBackend):
    """Real run folders and merges; only the trainer's program is another.

    It reads what lies beside the graph, so it is not confined.
    """

    def __init__(
        self, graph_paths: GraphPaths, config: BottomUpConfig, *rest: Any, **more: Any
    ) -> None:
        super().__init__(graph_paths, config, *rest, **{**more, "confinement": Confinement()})

    def job_of(self, prepared: PreparedRun, task: RunRequest) -> Job:
        job = super().job_of(prepared, task)
        argv = (sys.executable, "-m", "tests.parallel.stand_in", *job.argv[3:])
        return dataclasses.replace(job, argv=argv, cwd=ROOT)


class Place:
    """A folder with a graph, the orders of its trainers, and what those left behind."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.graph_paths = GraphPaths(folder / "graph")
        self.daemons: list[subprocess.Popen[str]] = []
        self.order()

    def copied(self, folder: Path) -> Place:
        """A copy of this place, in which no daemon runs."""
        copy = Place(folder)
        shutil.copytree(self.folder, folder, dirs_exist_ok=True)
        return copy

    def order(self, orders: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        """Say how the runs of each skill go; see `stand_in.Order`."""
        storage.write_atomic(self.folder / "orders.json", json.dumps(orders or {}))

    def open(self, gate: str) -> None:
        """Let those end who wait for this gate."""
        (self.folder / gate).touch()

    def start(self, *flags: str) -> subprocess.Popen[str]:
        """Start the story in a process of its own."""
        graph = f"--graph_path={self.graph_paths.root}"
        daemon = subprocess.Popen(
            [sys.executable, "-m", "tests.parallel.stand_in_story", graph, *flags],
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self.daemons.append(daemon)
        return daemon

    def end(self) -> None:
        """Kill the daemons that are left."""
        for daemon in self.daemons:
            daemon.kill()
            daemon.communicate()

    def run(self, *flags: str) -> tuple[int, str]:
        """The exit code of a whole story, and what it said."""
        return ended(self.start(*flags))

    def launches(self) -> list[str]:
        """The skill of every trainer that was started, in order."""
        path = self.folder / "launches"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line.rpartition(" ")[0] for line in lines]

    def lines(self) -> dict[str, dict[str, Any]]:
        """scheduler_state.json by skill; nothing before it is there."""
        if not self.graph_paths.scheduler_state.exists():
            return {}
        document = json.loads(self.graph_paths.scheduler_state.read_text())
        return {line["skill"]: line for line in document["skills"]}

    def statuses(self) -> dict[str, str]:
        """The status of each skill, in a word."""
        return {skill: line["status"] for skill, line in self.lines().items()}

    def merged(self) -> tuple[str, ...]:
        """The ids of all merged runs."""
        return ExpertStore(self.graph_paths).manifest().merged

    def experts(self) -> dict[int, tuple[str, int]]:
        """Skill and frames of every merged expert, each found undamaged."""
        store = ExpertStore(self.graph_paths)
        versions = store.manifest().experts.values()
        for version in versions:
            store.verify(version)
        return {version.index: (version.skill, version.frames) for version in versions}


def ended(daemon: subprocess.Popen[str]) -> tuple[int, str]:
    """The exit code of a daemon, once it has ended, and what it said."""
    _, said = daemon.communicate(timeout=DEADLINE_SECONDS)
    return daemon.returncode, said


def replace_trainers(replace: Callable[[Any, str, Any], object]) -> None:
    """Let this process train by stand-ins, and not try bubblewrap, which confines none of them.

    It looks for requests more often, as each test that sends one waits for it.
    """
    replace(training, "TrainingBackend", StandInBackend)
    program, parent = (sys.executable, "-m", "tests.parallel.stand_in"), str(os.getpid())
    replace(analysing, "flowrl_words", lambda *words: (*program, parent, *words))
    for module in (sandbox, skill_sources):
        replace(module, "confinement", lambda *_, **__: Confinement())
    replace(scheduler, "_LOOK_SECONDS", LOOK_SECONDS)


def read_stand_ins(replace: Callable[[Any, str, Any], object]) -> None:
    """Let this process read whole stand-ins itself, where else it would start a reader."""
    by_child = array_check.read_arrays

    def read(folders: Sequence[Path], expected: Shapes) -> tuple[ArrayReport, ...]:
        if expected == SHAPES and all(map(is_whole, folders)):
            return tuple(ArrayReport(content=content_digest(folder)) for folder in folders)
        return by_child(folders, expected)

    replace(array_check, "read_arrays", read)
    replace(training_backend, "start_reader", lambda: None)


if __name__ == "__main__":
    replace_trainers(setattr)
    if REAL_READERS not in os.environ:
        read_stand_ins(setattr)
    sys.exit(bottomup_parallel.main())
