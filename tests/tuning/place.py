"""Sweeps with stand-in trainers: `python -m tests.tuning.place GRAPH FLAGS` is `flowrl sweep`.

All but the trainer and the evaluation is real.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import subprocess
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from flowrl import cli
from flowrl.launchers.base import Job
from flowrl.launchers.sandbox import Confinement
from flowrl.parallel.events import RunRequest
from flowrl.parallel.training_setup import PreparedRun
from flowrl.paths import GraphPaths, RunPaths, SweepPaths
from flowrl.runs import read_result
from flowrl.tuning import outcome, running
from flowrl.tuning.outcome import EvaluateTrials
from flowrl.tuning.sweep import TrialBackend
from tests.waiting import limit

ROOT = Path(__file__).parents[2]


class StandInBackend(TrialBackend):
    """Real folders and records; only the trainer's program is another."""

    def job_of(self, prepared: PreparedRun, request: RunRequest) -> Job:
        job = super().job_of(prepared, request)
        argv = (sys.executable, "-m", "tests.tuning.stand_in", *job.argv[3:])
        return dataclasses.replace(job, argv=argv, cwd=ROOT, sandbox=())


class Place:
    """A folder with a graph, the orders of its trainers, and what those left behind."""

    def __init__(self, folder: Path, name: str = "s") -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.graph_paths = GraphPaths(folder / "graph")
        self.sweep_paths = SweepPaths(self.graph_paths.sweeps / name)
        self.graph_paths.checkpoints.mkdir(parents=True, exist_ok=True)
        self.order()

    def order(self, **orders: Any) -> None:
        """Say how trials go; see `Orders`."""
        (self.folder / "orders.json").write_text(json.dumps(orders))

    def start(self, *flags: str) -> subprocess.Popen[str]:
        """Start `flowrl sweep` in a process of its own."""
        words = [str(self.graph_paths.root), f"--name={self.sweep_paths.root.name}", *flags]
        return subprocess.Popen(
            [sys.executable, "-m", "tests.tuning.place", *words],
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )

    def run(self, *flags: str) -> tuple[int, str, str]:
        """The exit code of a whole sweep, and what it printed."""
        process = self.start(*flags)
        printed, said = process.communicate(timeout=limit(120.0))
        return process.returncode, printed, said

    def launches(self) -> list[str]:
        """The folder of every trainer that was started, in order."""
        path = self.folder / "launches"
        return path.read_text().split() if path.exists() else []

    def file(self, number: int, name: str) -> Path:
        """A file in the folder of a trial."""
        return self.sweep_paths.training_runs / str(number) / name

    def records(self, name: str = "trial.json") -> dict[int, dict[str, Any]]:
        """The trial.json, or another record, of each trial."""
        found = self.sweep_paths.training_runs.glob(f"*/{name}")
        return {int(path.parent.name): json.loads(path.read_text()) for path in found}


def evaluate(order: EvaluateTrials, *_: Any, **__: Any) -> bytes:
    """Succeed as often as in training, after a line that a library has printed."""
    printed = io.StringIO("hello 1\n")
    printed.seek(0, io.SEEK_END)
    stub = types.SimpleNamespace(
        evaluate_runs=evaluate_runs, evaluate_candidates=evaluate_candidates
    )
    with patch.dict(sys.modules, {"flowrl.evaluation": stub}), contextlib.redirect_stdout(printed):
        assert order.work() == 0
    return printed.getvalue().encode()


def evaluate_runs(places: Sequence[RunPaths], *, episodes: int, seed: int) -> list[Any]:
    """Reports of experts that succeed as often as in training."""
    rates = [read_result(run_paths).success_rate for run_paths in places]
    steps = [types.SimpleNamespace(successes=round(episodes * rate)) for rate in rates]
    return [types.SimpleNamespace(steps=[step]) for step in steps]


def evaluate_candidates(
    places: Sequence[RunPaths], *, episodes: int, seed: int
) -> list[tuple[int, list[tuple[str, float, float, float]]]]:
    """Their successes, and two terms."""
    terms = [("a", 0.5, 0.25, 1.0), ("b", 0.0, 0.0, 0.0)]
    reports = evaluate_runs(places, episodes=episodes, seed=seed)
    return [(report.steps[0].successes, terms) for report in reports]


def replace_trainers(replace: Callable[[Any, str, Any], object]) -> None:
    """Let the sweeps of this process have stand-ins."""
    replace(running, "TrialBackend", StandInBackend)
    replace(running.sandbox, "confinement", lambda *_, **__: Confinement())
    replace(outcome, "confined_run", evaluate)


def main(words: list[str]) -> int:
    """Be the sweep."""
    replace_trainers(setattr)
    return cli.main(["sweep", *words])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
