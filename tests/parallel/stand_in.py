"""A trainer without training: `python -m tests.parallel.stand_in --module_path RUN/2.py …`.

It reads run.json and leaves behind what a trainer leaves, within a tenth of a second. What it does
for a skill is ordered in `orders.json` beside the graph's folder: see `Order`. With the number of
its parent and the words of `flowrl analyse` it stands in for that.
"""

from __future__ import annotations

import itertools
import json
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from flowrl import runs, storage
from flowrl.errors import EXIT_RESUMABLE
from flowrl.launchers.child import die_with_parent
from flowrl.paths import RunPaths
from flowrl.runs import ExpertReport, Progress, RunResult, TrainingRun
from tests.experts.making import SHAPES, content_digest, make_expert

DEADLINE_SECONDS = 600.0  # nobody waits for it any more


@dataclass(frozen=True, kw_only=True)
class Order:
    """How the runs of one skill go."""

    acted: dict[str, int] = field(default_factory=dict)  # by expert; else 100 for the new one
    fails: int = 0  # so many starts of a trainer fail
    code: int = 1  # with this exit code
    gate: str = ""  # it ends only when this file is there
    success_rate: float = 0.9
    overshoots: bool = False  # it comes to that at once, past the goal of a run that ends early
    update_seconds: float = 0.0  # until then it makes an update so often, and saves when asked
    seconds: float = 0.0  # it takes so long besides
    lingers: float = 0.0  # and lives on so long with its result
    analysis_gate: str = ""  # its analysis ends only when this file is there
    analysis_code: int = 0  # with this exit code


def main(argv: list[str]) -> int:
    """Train one run."""
    module = Path(argv[argv.index("--module_path") + 1])
    run_paths = RunPaths(module.parent, int(module.stem))
    run = runs.read_run(run_paths)
    here = run_paths.folder.parents[2]
    orders = json.loads((here / "orders.json").read_text())
    order = Order(**orders.get(run.skill, {}))
    storage.append_line(here / "launches", f"{run.skill} {run.run_id}")
    sys.stdout.write(f"training {run.skill}, attempt {run.attempt}\n")
    _tell_progress(run_paths, run, updates=1)
    if order.update_seconds:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_RESUMABLE))
        for updates in itertools.takewhile(
            lambda _: not (here / order.gate).exists(), itertools.count(2)
        ):
            _tell_progress(run_paths, run, updates=updates)
            time.sleep(order.update_seconds)
    _wait_for(here / order.gate)
    time.sleep(order.seconds)
    starts = (here / "launches").read_text().splitlines()
    number = sum(line.startswith(f"{run.skill} ") for line in starts)
    if number <= order.fails:
        sys.stderr.write("it was ordered to fail:\n")
        sys.stderr.write(f"{'again, ' * number}another error than before\n")
        return order.code
    _finish(run_paths, run, order)
    time.sleep(order.lingers)
    return 0


def analyse(argv: list[str]) -> int:
    """Analyse one skill."""
    parent, _, graph, skill, *_ = argv
    die_with_parent(int(parent))
    here, name = Path(graph).parent, skill.partition("=")[2]
    storage.append_line(here / "analyses", f"{name} {' '.join(argv[4:])}")
    order = Order(**json.loads((here / "orders.json").read_text()).get(name, {}))
    _wait_for(here / order.analysis_gate)
    sys.stderr.write("it was ordered to end\n")
    return order.analysis_code


def _tell_progress(run_paths: RunPaths, run: TrainingRun, *, updates: int) -> None:
    progress = Progress(
        run_id=run.run_id,
        updates=updates,
        frames=10,
        total_frames=100,
        steps_per_second=1000.0,
        step_success=(0.5,) * len(run.plan),
        eta_seconds=0.1,
        phase="training",
        updated_at=time.time(),
    )
    runs.write_progress(run_paths, progress)
    storage.append_line(run_paths.metrics, '{"updates": 1}')


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            raise SystemExit(f"{path} did not come")
        time.sleep(0.01)


def _finish(run_paths: RunPaths, run: TrainingRun, order: Order) -> None:
    """Final experts at one stroke, then result.json; an expert that did not act is unchanged."""
    acted = {int(expert): steps for expert, steps in order.acted.items()} or {run.expert: 100}
    contents = {ancestor.index: ancestor.content for ancestor in run.ancestors}
    building = run_paths.policies / "final.tmp"
    for local, expert in enumerate(run.experts):
        target = building / run_paths.final(local).name
        if acted.get(expert, 0) or not run_paths.seed(local).exists():
            make_expert(target, f"{run.run_id} expert {expert}")
            contents[expert] = content_digest(target)
        else:
            storage.copy_tree(run_paths.seed(local), target)
    storage.commit_dir(building, run_paths.finals)
    goal = run.config["success_state_rate"] if run.goal and not order.overshoots else 1.0
    success_rate = min(order.success_rate, goal)
    result = RunResult(
        run_id=run.run_id,
        frames=sum(acted.values()),
        experts=tuple(
            ExpertReport(
                expert=expert,
                acted=acted.get(expert, 0),
                sha256=storage.tree_digest(run_paths.final(local)),
                content=contents[expert],
                shapes=SHAPES,
            )
            for local, expert in enumerate(run.experts)
        ),
        success_rate=success_rate,
        step_success=(success_rate,) * len(run.plan),
        mean_episode_length=40.0,
        updates=1,
        wall_seconds=0.1,
        stopped_early=True,
    )
    runs.write_result(run_paths, result)


if __name__ == "__main__":
    sys.exit((analyse if "analyse" in sys.argv else main)(sys.argv[1:]))
