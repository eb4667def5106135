"""How well judges tell which episodes will succeed: `python scripts/bench_judges.py [--folder F]`.

Six skills of a graph that is trained for a minute each are played, and kept in the folder. The
judges see the first half of a usual episode. "transformer / logistic" has the areas under the ROC
curve of both, after learning from so many episodes of all six skills, on other episodes; "choice"
has that of the judge that the program takes, beside the better one of both. "held-out skills" has
the figures of each judge on two skills, after learning from the four others, with 95 % bootstrap
intervals. Judges behind an endpoint are not measured here: `flowrl judge --benchmark` does so.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from benchmarking import Row, arguments, report

from flowrl.evaluation import record
from flowrl.experts.store import ExpertStore
from flowrl.judging.calibration import auc, measure, scores_of
from flowrl.judging.ensemble import fit_ensemble
from flowrl.judging.judge import Judge, Recording, RuleJudge, Trajectory
from flowrl.judging.learned import better, fit_logistic, fit_transformer
from flowrl.judging.report import Calibration
from flowrl.paths import GraphPaths, slug
from flowrl.runs import read_result, read_run

SKILLS, HELD_OUT = 6, ("Place Plant", "Make Wood Pickaxe")
TRAINING = (
    "--total_timesteps 60k --success_state_rate 0.5 --max_task_steps 100 --max_parallel_skills 1 "
    "--launcher local"
)
SIZES = (500, 2000, 8000)
LEARN, UNSEEN = (5, 1792), (6, 640)  # seed and episodes of each skill
Labelled = tuple[list[Trajectory], np.ndarray]


def trained(folder: Path, skills: int) -> GraphPaths:
    """The graph in the folder, trained now if it is missing."""
    root = folder / "graph"
    if not root.exists():
        words = ["train", str(root), "--max_nodes", str(skills), *TRAINING.split()]
        subprocess.run([sys.executable, "-m", "flowrl", *words], check=True)
    return GraphPaths(root)


def played(graph_paths: GraphPaths, seed: int, episodes: int) -> dict[str, Labelled]:
    """The beginnings of each skill's episodes, and their outcomes."""
    found = {}
    for version in ExpertStore(graph_paths).manifest().experts.values():
        path = graph_paths.root.parent / f"{slug(version.skill)}.{seed}.{episodes}.safetensors"
        if not path.exists():
            made = record(graph_paths, version.skill, episodes=episodes, seed=seed)
            path.write_bytes(made.to_bytes())
        found[version.skill] = Recording.from_bytes(version.skill, path.read_bytes()).prefixes()
    return found


def mixed(parts: Sequence[Labelled], seed: int = 0) -> Labelled:
    """All items of several skills, in an order of their own."""
    items = [item for some, _ in parts for item in some]
    labels = np.concatenate([outcomes for _, outcomes in parts])
    order = np.random.default_rng(seed).permutation(len(items))
    return [items[row] for row in order], labels[order]


def learned(items: list[Trajectory], labels: np.ndarray) -> tuple[Judge, Judge, Judge, float]:
    """Both judges, the one that is chosen, and the CPU seconds that the transformer took."""
    tune = len(items) * 3 // 4
    small = fit_logistic(items[:tune], labels[:tune])
    began = time.process_time()
    large = fit_transformer(items[:tune], labels[:tune], seed=0)
    seconds = time.process_time() - began
    return small, large, better(small, large, items[tune:], labels[tune:]), seconds


def area(judge: Judge, unseen: Labelled) -> float:
    items, labels = unseen
    return auc(scores_of(judge, items), labels)


def by_size(learn: Labelled, unseen: Labelled, sizes: Sequence[int]) -> list[Row]:
    rows = []
    for size in sizes:
        items, labels = learn[0][:size], learn[1][:size]
        small, large, chosen, seconds = learned(items, labels)
        areas = {judge.name: area(judge, unseen) for judge in (small, large)}
        one, other, best = areas[large.name], areas[small.name], max(areas.values())
        took = areas[chosen.name]
        head = f"{len(items):,} episodes"
        rows += [
            Row(
                case=f"AUC transformer / logistic, {head}",
                ours=one,
                baseline=other,
                unit="AUC",
                ratio=one / other,
            ),
            Row(
                case=f"AUC of the choice ({chosen.name}), {head}",
                ours=took,
                baseline=best,
                unit="AUC",
                ratio=took / best,
            ),
            Row(case=f"training the transformer, {head}", ours=seconds, unit="CPU s"),
        ]
    return rows


def on_held_out_skills(
    graph_paths: GraphPaths,
    learn: dict[str, Labelled],
    unseen: dict[str, Labelled],
    held: Sequence[str],
) -> list[Row]:
    store = ExpertStore(graph_paths)
    archives = [store.archive_of(skill) for skill in learn]
    rule = RuleJudge({read_run(run_paths).skill: read_result(run_paths) for run_paths in archives})
    items, labels = mixed([part for skill, part in learn.items() if skill not in held])
    small, large, _, _ = learned(items, labels)
    tune = slice(len(items) * 3 // 4, None)
    judges = [rule, small, large]
    ensemble = fit_ensemble(judges, items[tune], labels[tune])
    others = mixed([unseen[skill] for skill in held])
    rows = []
    for judge in [*judges, ensemble]:
        tuned, measured = (
            (scores_of(judge, some), outcomes)
            for some, outcomes in ((items[tune], labels[tune]), others)
        )
        found = measure(judge, "episode", measured, tuned=tuned)
        rows += figures(found)
    return rows


def figures(found: Calibration) -> list[Row]:
    """The figures of a judge; one that abstained on nearly all has none."""
    rows = []
    for name in ("auc", "ece", "kappa"):
        one = getattr(found, name)
        if one is not None:
            case = f"{found.judge} on held-out skills [{one.low:.2f}, {one.high:.2f}]"
            rows.append(
                Row(case=case, ours=one.value, unit={"auc": "AUC", "ece": "ECE"}.get(name, "κ"))
            )
    return rows or [
        Row(
            case=f"{found.judge} on held-out skills, answered", ours=found.answered, unit="episodes"
        )
    ]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--folder", type=Path, default=Path("exp/bench_judges"))
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    graph_paths = trained(args.folder, 2 if args.small else SKILLS)
    asked = [(seed, 256 if args.small else episodes) for seed, episodes in (LEARN, UNSEEN)]
    learn, unseen = (played(graph_paths, *each) for each in asked)
    sizes = (200,) if args.small else SIZES
    rows = by_size(mixed([*learn.values()]), mixed([*unseen.values()]), sizes)
    held = [*learn][-1:] if args.small else HELD_OUT
    rows += on_held_out_skills(graph_paths, learn, unseen, held)
    report("judges", rows, args.json)


if __name__ == "__main__":
    main()
