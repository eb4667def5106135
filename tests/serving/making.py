"""Graphs with a run that has figures, made by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from flowrl import runs, storage
from flowrl.errors import NameRefusedError
from flowrl.judging.calibration import measure
from flowrl.judging.judge import RuleJudge
from flowrl.judging.report import JudgeReport
from flowrl.paths import GraphPaths, RunPaths, display_name, slug
from flowrl.storage import records
from tests.commands.making import DONE, WAITING, running, save, tell_progress, write_log
from tests.hostile_names import HOSTILE

STEPS = ("Collect Wood", "Place Table")


def a_graph(root: Path) -> GraphPaths:
    """One skill completed, one under way with figures, one that waits for it."""
    graph_paths = save(
        root,
        ("Collect Wood", DONE),
        ("Place Table", running("e1.a1.x"), ("Collect Wood",)),
        ("Make Wood Pickaxe", WAITING, ("Place Table",)),
    )
    write_run(graph_paths.run(1, "Place Table"))
    return graph_paths


def write_run(run_paths: RunPaths) -> None:
    """A run of two steps: plan, figures, progress and log."""
    tell_progress(run_paths, "e1.a1.x", phase="training")
    plan = [runs.PlannedStep(skill=name, count=1, expert=n) for n, name in enumerate(STEPS)]
    run = runs.TrainingRun(
        run_id="e1.a1.x",
        skill=STEPS[-1],
        expert=1,
        attempt=1,
        plan=tuple(plan),
        experts=(0, 1),
        ancestors=(),
        config={"lr": 0.5},
        origins={"lr": "command line"},
    )
    runs.write_run(run_paths, run)
    lines = [json.dumps(_line(update)) for update in range(1, 40)]
    run_paths.metrics.write_text("\n".join(lines) + '\n{"half a li')
    write_log(run_paths.training_log, "first\n<b>last</b> \x1b[31mline\x1b[0m\n")


def _line(update: int) -> dict[str, float]:
    line = {"frames": 1000 * update, "seconds": float(update), "success_rate": update / 40}
    line |= {"mean_episode_length": 9.0, "mean_episode_return": update / 10}
    line["episodes"] = 60 + 40 * len(STEPS)
    for number, name in enumerate(STEPS):
        step = f"{number}_{name.replace(' ', '_')}"
        line |= {f"begun/{step}": 100, f"done/{step}": 60, f"died/{step}": 40, f"cut/{step}": 0}
    return line


def hostile_names() -> list[str]:
    """The hostile names that a graph admits, one for each folder."""
    found: dict[str, str] = {}
    for text in HOSTILE:
        try:
            found.setdefault(slug(text), display_name(text))
        except NameRefusedError:
            continue
    return [*found.values()]


def a_judge(graph_paths: GraphPaths, *, answered: int = 200) -> JudgeReport:
    """The report of a judge that was measured on 200 episodes, and abstained on the others."""
    rng = np.random.default_rng(0)
    scores = rng.random(200)
    labels = rng.random(200) < scores
    scores[answered:] = np.nan
    known = (scores, labels)
    measured = measure(RuleJudge({}), "episode", known, tuned=known, abstained="it knows nothing")
    report = JudgeReport(generation=1, calibration=measured, scores={})
    storage.make_dir(graph_paths.judging)
    records.write(graph_paths.judging / "rule.json", report)
    return report
