"""A trainer without training: `python -m tests.tuning.stand_in --module_path RUN/0.py …`.

It leaves behind what a trainer leaves, as `orders.json` beside the graph's folder says.
"""

from __future__ import annotations

import json
import math
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from flowrl import runs, storage
from flowrl.errors import EXIT_DIVERGED, EXIT_RESUMABLE
from flowrl.paths import RunPaths
from flowrl.runs import ExpertReport, Progress, RunResult, StepEnds, TrainingRun
from tests.experts.making import SHAPES, content_digest, make_expert

FRAMES, UPDATES = 1000, 10
BEST_LR = 3e-3


@dataclass(frozen=True, kw_only=True)
class Orders:
    """How trials go."""

    update_seconds: float = 0.0
    diverge_above: float = math.inf  # learning rates that are not finite
    fails_once: bool = False  # half way
    success: float = 0.9  # at the best learning rate
    words: dict[str, float] = field(default_factory=dict)  # the success of texts with such a word


def train(module: Path) -> int:
    """Train one run: success rises the faster, the nearer its learning rate is to the best."""
    run_paths = RunPaths(module.parent, int(module.stem))
    run = runs.read_run(run_paths)
    here = run_paths.folder.parents[4]
    orders = Orders(**json.loads((here / "orders.json").read_text()))
    storage.append_line(here / "launches", run_paths.folder.name)
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    lr = run.config["lr"]
    if lr > orders.diverge_above:
        sys.stderr.write("flowrl: the loss is not finite\n")
        return EXIT_DIVERGED
    storage.remove_file(run_paths.metrics)
    most = orders.success * math.exp(-abs(math.log10(lr / BEST_LR)))
    text = module.read_text()
    most = next((rate for word, rate in orders.words.items() if word in text), most)
    for update in range(1, UPDATES + 1):
        time.sleep(orders.update_seconds)
        success = most * update / UPDATES
        tell(run_paths, run, update, success)
        if orders.fails_once and run.attempt == 1 and update == UPDATES // 2:
            return 1
        if asked and (run_paths.folder / "prune.json").exists():
            finish(run_paths, run, update, success, pruned=True)
            return 0
        if asked:
            return EXIT_RESUMABLE
    finish(run_paths, run, UPDATES, success)
    return 0


def tell(run_paths: RunPaths, run: TrainingRun, update: int, success: float) -> None:
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
    storage.append_line(run_paths.metrics, json.dumps(figures))
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
    runs.write_progress(run_paths, progress)


def finish(
    run_paths: RunPaths, run: TrainingRun, update: int, success: float, *, pruned: bool = False
) -> None:
    """Final experts at one stroke, then result.json."""
    building = run_paths.policies / "final.tmp"
    storage.remove_tree(building)
    storage.remove_tree(run_paths.finals)
    for local, expert in enumerate(run.experts):
        make_expert(building / run_paths.final(local).name, f"{run.run_id} expert {expert}")
    storage.commit_dir(building, run_paths.finals)
    frames, episodes = update * FRAMES, update * 10
    done = round(episodes * success)
    ends = StepEnds(
        begun=episodes, done=done, died=episodes - done, cut=0, running=0, timesteps=frames
    )
    result = RunResult(
        run_id=run.run_id,
        frames=frames,
        experts=tuple(
            ExpertReport(
                expert=expert,
                acted=frames if expert == run.expert else 0,
                sha256=storage.tree_digest(run_paths.final(local)),
                content=content_digest(run_paths.final(local)),
                shapes=SHAPES,
            )
            for local, expert in enumerate(run.experts)
        ),
        success_rate=success,
        step_success=(success,) * len(run.plan),
        step_ends=(ends,) * len(run.plan),
        mean_episode_length=40.0,
        updates=update,
        wall_seconds=update * 0.1,
        stopped_early=False,
        stopped="pruned" if pruned else "",
    )
    runs.write_result(run_paths, result)


if __name__ == "__main__":
    sys.exit(train(Path(sys.argv[sys.argv.index("--module_path") + 1])))
