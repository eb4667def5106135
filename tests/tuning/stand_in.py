"""Sweeps with stand-in trainers: `python -m tests.tuning.stand_in GRAPH FLAGS` is `flowrl sweep`.

All but the trainer is real. The trainer, `python -m tests.tuning.stand_in --module_path RUN/2.py`,
leaves behind what a trainer leaves, as `orders.json` beside the graph's folder says.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from flowrl import cli, runs, storage
from flowrl.commands import sweep as command
from flowrl.errors import EXIT_DIVERGED, EXIT_RESUMABLE
from flowrl.launchers.base import Job
from flowrl.launchers.sandbox import Confinement
from flowrl.parallel.events import RunRequest
from flowrl.parallel.run_folder import PreparedRun
from flowrl.paths import GraphPaths, RunPaths, SweepPaths
from flowrl.runs import ExpertReport, Progress, RunResult, TrainingRun
from flowrl.tuning.sweep import TrialBackend
from tests.experts.making import SHAPES, content_digest, make_expert
from tests.waiting import limit

ROOT = Path(__file__).parents[2]
FRAMES, UPDATES = 1000, 10
BEST_LR = 3e-3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Orders:
    """How trials go."""

    update_seconds: float = 0.0
    diverge_above: float = math.inf  # learning rates that are not finite
    success: float = 0.9  # at the best learning rate


class StandInBackend(TrialBackend):
    """Real folders and records; only the trainer's program is another."""

    def _job(self, prepared: PreparedRun, request: RunRequest) -> Job:
        job = super()._job(prepared, request)
        argv = (sys.executable, "-m", "tests.tuning.stand_in", *job.argv[3:])
        return dataclasses.replace(job, argv=argv, cwd=ROOT, sandbox=())


class Place:
    """A folder with a graph, the orders of its trainers, and what those left behind."""

    def __init__(self, folder: Path, name: str = "s") -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.layout = GraphPaths(folder / "graph")
        self.sweep = SweepPaths(self.layout.sweeps / name)
        self.order()

    def order(self, **orders: Any) -> None:
        """Say how trials go; see `Orders`."""
        (self.folder / "orders.json").write_text(json.dumps(orders))

    def start(self, *flags: str) -> subprocess.Popen[str]:
        """Start `flowrl sweep` in a process of its own."""
        words = [str(self.layout.root), f"--name={self.sweep.root.name}", *flags]
        return subprocess.Popen(
            [sys.executable, "-m", "tests.tuning.stand_in", *words],
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

    def records(self, name: str = "trial.json") -> dict[int, dict[str, Any]]:
        """The trial.json, or another record, of each trial."""
        found = self.sweep.training_runs.glob(f"*/{name}")
        return {int(path.parent.name): json.loads(path.read_text()) for path in found}


def train(module: Path) -> int:
    """Train one run: success rises the faster, the nearer its learning rate is to the best."""
    place = RunPaths(module.parent, int(module.stem))
    run = runs.read_run(place)
    here = place.folder.parents[4]
    orders = Orders(**json.loads((here / "orders.json").read_text()))
    storage.append_line(here / "launches", place.folder.name)
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    lr = run.config["lr"]
    if lr > orders.diverge_above:
        sys.stderr.write("flowrl: the loss is not finite\n")
        return EXIT_DIVERGED
    storage.remove_file(place.metrics)
    most = orders.success * math.exp(-abs(math.log10(lr / BEST_LR)))
    for update in range(1, UPDATES + 1):
        time.sleep(orders.update_seconds)
        success = most * update / UPDATES
        tell(place, run, update, success)
        if asked and (place.folder / "prune.json").exists():
            finish(place, run, update, success, pruned=True)
            return 0
        if asked:
            return EXIT_RESUMABLE
    finish(place, run, UPDATES, success)
    return 0


def tell(place: RunPaths, run: TrainingRun, update: int, success: float) -> None:
    """Write progress.json and a line of metrics.jsonl."""
    frames = update * FRAMES
    figures = {
        "updates": update,
        "frames": frames,
        "seconds": update * 0.1,
        "success_rate": success,
        "mean_episode_length": 40.0,
        "mean_episode_return": success,
    }
    storage.append_line(place.metrics, json.dumps(figures))
    progress = Progress(
        run_id=run.run_id,
        updates=update,
        frames=frames,
        total_frames=UPDATES * FRAMES,
        steps_per_second=1e4,
        step_success=(success,) * len(run.plan),
        eta_seconds=0.0,
        phase="training",
        updated_at=time.time(),
    )
    runs.write_progress(place, progress)


def finish(
    place: RunPaths, run: TrainingRun, update: int, success: float, *, pruned: bool = False
) -> None:
    """Final experts at one stroke, then result.json."""
    building = place.policies / "final.tmp"
    storage.remove_tree(building)
    storage.remove_tree(place.finals)
    for local, expert in enumerate(run.experts):
        make_expert(building / place.final(local).name, f"{run.run_id} expert {expert}")
    storage.commit_dir(building, place.finals)
    frames = update * FRAMES
    result = RunResult(
        run_id=run.run_id,
        frames=frames,
        experts=tuple(
            ExpertReport(
                expert=expert,
                acted=frames if expert == run.expert else 0,
                sha256=storage.tree_digest(place.final(local)),
                content=content_digest(place.final(local)),
                shapes=SHAPES,
            )
            for local, expert in enumerate(run.experts)
        ),
        success_rate=success,
        step_success=(success,) * len(run.plan),
        mean_episode_length=40.0,
        updates=update,
        wall_seconds=update * 0.1,
        stopped_early=False,
    )
    runs.write_result(place, result)


def evaluate(order: dict[str, Any]) -> int:
    """Succeed as often as in training."""
    for number in order["numbers"]:
        result = json.loads(Path(order["sweep"], "trials", str(number), "result.json").read_text())
        sys.stdout.write(f"{number} {round(256 * result['success_rate'])}\n")
    return 0


def main(words: list[str]) -> int:
    """Be the trainer or the sweep, by the first word."""
    if words[0] == "--module_path":
        return train(Path(words[1]))
    if words[0] == "--evaluate":
        return evaluate(json.loads(words[1]))
    evaluation = (sys.executable, "-m", "tests.tuning.stand_in", "--evaluate")
    command.confined_child = lambda *given, **_: ((*evaluation, given[-1]), dict(os.environ))
    command.TrialBackend = StandInBackend  # type: ignore[misc]
    command.sandbox.confinement = lambda *_, **__: Confinement()  # type: ignore[assignment]
    return cli.main(["sweep", *words])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
