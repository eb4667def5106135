#!/usr/bin/env python3
"""How many frames a skill deep in the graph takes to learn, one lever against the next.

    scripts/bench_deep.py [--target "Collect Coal"] [--frames 2e6] [--seeds 3] [--json FILE]
    scripts/bench_deep.py --plan [--target "Make Iron Pickaxe"] [--frames 1.5e6] [--seeds 1]
    scripts/bench_deep.py --speed
    scripts/bench_deep.py --small

Each arm trains the same graph to the same target with the same seeds, and differs from the arm
before it in one lever. Its runs are ordinary ones; their folders stay in --folder, so a benchmark
that was stopped goes on. Frames are counted, not seconds: the machine may be busy. A seed that does
not come to a share of success counts with all its frames, and its row says so.

With --plan the arms differ in what a long plan does to experts that were trained before. All arms
of a seed begin with copies of one graph, in which what the target needs is trained.

--speed instead takes updates of experts with sight in the player's frame, and of experts that see
the game's observation alone, in turns.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from benchmarking import Row, arguments, paired, report

import flowrl
from flowrl.arguments import count
from flowrl.config import PPOConfig
from flowrl.measures.objectives import read_curve
from flowrl.paths import GraphPaths, slug
from flowrl.skills.graph import SkillGraph
from flowrl.skills.skill import load_library

WORLDS_FRAME = {"egocentric": False, "settled_frames": 0}
ARMS = {
    "the game's observation": {**WORLDS_FRAME, "sight": False},
    "sight": {**WORLDS_FRAME, "coverage_bonus": 0.0},
    "sight, coverage bonus": WORLDS_FRAME,
    "sight, coverage bonus, the player's frame": {"settled_frames": 0},
}
OFF = {"keep_needs": False, "settled_frames": 0, "schedule_timesteps": 10_000_000}
PLAN_ARMS = {
    "steps as their skills say": OFF,
    "steps keep what later ones need": {**OFF, "keep_needs": True},
    "experts also settle after 300k frames": {**OFF, "keep_needs": True, "settled_frames": 300_000},
    "experts also settle after 100k frames": {**OFF, "keep_needs": True, "settled_frames": 100_000},
}
SHARES = (0.5, 0.7, 0.9)
PLAN_SHARES = (0.2, 0.4, 0.5)


def train(folder: Path, target: str, *, frames: int, seed: int, flags: dict) -> None:
    """Train what the target needs, then the target, each until its goal or its budget."""
    flowrl.train(
        folder,
        target_skill=target,
        show=False,
        seed=seed,
        total_timesteps=frames,
        max_parallel_skills=1,
        slot_minutes=0.0,
        launcher="local",
        success_state_rate=max(SHARES),
        needs_success_rate=0.0,
        min_success_rate=0.0,
        log_seconds=0.0,
        **flags,
    )


class Learned:
    """One arm with one seed: the runs of its graph."""

    def __init__(self, folder: Path, target: str, *, flags: dict, seed: int, frames: int) -> None:
        train(folder, target, frames=frames, seed=seed, flags=flags)
        rows = {row.skill: row for row in flowrl.status(folder)}
        self.frames = frames
        self.needs = sum(row.frames or 0 for row in rows.values() if row.skill != target)
        (archive,) = GraphPaths(folder).skills.glob(f"*_{slug(target)}")
        self.curve = read_curve(archive / "metrics.jsonl")

    def until(self, share: float) -> int | None:
        """Frames of the target's own run until so many of its newest episodes succeeded."""
        return next((point.frames for point in self.curve if point.success >= share), None)


def learned(
    folder: Path, target: str, *, seeds: int, frames: int, plan: bool
) -> dict[str, list[Learned]]:
    """All arms with all seeds, seed by seed: a benchmark that is stopped has whole pairs."""
    arms = PLAN_ARMS if plan else ARMS
    found: dict[str, list[Learned]] = {arm: [] for arm in arms}
    for seed in range(seeds):
        base = folder / f"needs_{seed}"
        for need in needs_of(target) if plan else ():
            train(base, need, frames=2_000_000, seed=1000 * seed, flags=next(iter(arms.values())))
        for number, (arm, flags) in enumerate(arms.items()):
            place = folder / f"{number}_{seed}"
            if plan and not place.exists():
                shutil.copytree(base, place)
            one = Learned(place, target, flags=flags, seed=1000 * seed, frames=frames)
            found[arm].append(one)
            until = {share: one.until(share) for share in (PLAN_SHARES if plan else SHARES)}
            sys.stdout.write(f"{arm}, seed {seed}: {json.dumps(until)}, needs {one.needs}\n")
            sys.stdout.flush()
    return found


def needs_of(target: str) -> tuple[str, ...]:
    """The skills that a skill of Classic needs directly."""
    return SkillGraph(load_library(PPOConfig.env_name).values()).needs(target)


def rows(target: str, found: dict[str, list[Learned]], *, plan: bool) -> Iterator[Row]:
    """Medians over seeds; the ratio is the median of the pairs with the arm before."""
    for (_, before), (arm, after) in pairwise(found.items()):
        for share in PLAN_SHARES if plan else SHARES:
            yield _row(f"{target} to {share:.0%}, {arm}", before, after, share)
        if plan:
            continue
        ours, theirs = ([one.needs for one in side] for side in (after, before))
        yield Row(
            case=f"all that it needs, {arm}",
            ours=statistics.median(ours) / 1e3,
            baseline=statistics.median(theirs) / 1e3,
            unit="k frames",
            ratio=statistics.median(b / a for a, b in zip(ours, theirs, strict=True)),
        )


def _row(case: str, before: list[Learned], after: list[Learned], share: float) -> Row:
    missed = sum(one.until(share) is None for one in after)
    ours, theirs = ([one.until(share) or one.frames for one in side] for side in (after, before))
    return Row(
        case=f"{case} ({missed} of {len(after)} seeds did not)" if missed else case,
        ours=statistics.median(ours) / 1e3,
        baseline=statistics.median(theirs) / 1e3,
        unit="k frames",
        ratio=statistics.median(b / a for a, b in zip(ours, theirs, strict=True)),
    )


def speed(rounds: int) -> Row:
    """Environment steps per second of whole updates, by what experts see."""
    from bench_ppo import SKILL, UPDATES, Ours  # loads JAX
    from training_cases import opened, planned

    goal = 2.0  # which no run reaches
    configs = [
        PPOConfig(sight=more, egocentric=more, success_state_rate=goal) for more in (True, False)
    ]
    ours, baseline = (Ours(opened(planned(SKILL, each), each)) for each in configs)
    steps = UPDATES * configs[0].num_envs * configs[0].num_steps
    pair = paired(ours, baseline, rounds=rounds)
    return pair.rate_row(
        "whole updates, 64 x 64, sight in the player's frame", work=steps, unit="steps/s"
    )


def main() -> int:
    """Train and report."""
    parser = arguments(__doc__)
    parser.add_argument("--target", default="Collect Coal", help="the skill to learn")
    parser.add_argument("--frames", type=count, default=2_000_000, help="of each run, at most")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("exp/bench_deep"))
    parser.add_argument("--plan", action="store_true", help="what a plan does to earlier experts")
    parser.add_argument("--speed", action="store_true", help="measure steps per second alone")
    args = parser.parse_args()
    if args.speed:
        report("deep_speed", [speed(5 if args.small else 20)], args.json)
        return 0
    target, frames, seeds = args.target, args.frames, args.seeds
    if args.small:
        target, frames, seeds = "Collect Stone", 300_000, 1
    folder = args.folder / f"{'plan_' if args.plan else ''}{slug(target)}"
    found = learned(folder, target, seeds=seeds, frames=frames, plan=args.plan)
    report("deep", list(rows(target, found, plan=args.plan)), args.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
