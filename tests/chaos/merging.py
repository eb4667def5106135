"""Six mergers at once, each killed at a random instant: every run is merged exactly once."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

from flowrl.parallel.training_processor import recover_graph
from flowrl.parallel.training_setup import PreparedRun
from flowrl.paths import GraphPaths
from flowrl.skills.graph import SkillGraph
from tests.chaos.place import Trial
from tests.experts.making import contents
from tests.parallel.making import ExpertStore, finish, make_skill, merge, prepare
from tests.parallel.stand_in_story import ROOT

MERGERS = 6
BASE_FRAMES = 50


def six_mergers(folder: Path, chance: random.Random) -> list[Trial]:
    """Six runs that all trained expert 0 too, merged by six processes of which each is killed."""
    layout = GraphPaths(folder / "graph")
    runs = six_finished_runs(layout)
    living = {number: (merger(layout, runs[number]), True) for number in range(MERGERS)}
    began = time.monotonic()
    while living:
        number = chance.choice(list(living))
        process, to_kill = living.pop(number)
        if to_kill:
            time.sleep(chance.uniform(0.0, 0.3))
            process.kill()
        if process.wait(timeout=120) != 0:
            living[number] = (merger(layout, runs[number]), False)
    millis = 1000 * (time.monotonic() - began)
    recover_graph(layout)
    return [judged(layout, runs, millis)]


def six_finished_runs(layout: GraphPaths) -> list[PreparedRun]:
    skills = [make_skill(f"Skill {n}", needs=("base",), gain=f"gain_{n}") for n in range(MERGERS)]
    graph = SkillGraph([make_skill("Base", gain="base"), *skills])
    base = prepare(layout, "Base", 0, {}, graph=graph)
    finish(base.layout, {0: BASE_FRAMES})
    merge(layout, base)
    runs = []
    for number, skill in enumerate(skills, start=1):
        run = prepare(layout, skill.name, number, {"Base": 0}, graph=graph)
        finish(run.layout, {0: 10 * number, number: number})
        runs.append(run)
    return runs


def merger(layout: GraphPaths, run: PreparedRun) -> subprocess.Popen[bytes]:
    words = (layout.root, run.run_folder, run.run.expert, run.run.skill)
    return subprocess.Popen(
        [sys.executable, "-m", "tests.chaos.merge_once", *map(str, words)], cwd=ROOT
    )


def judged(layout: GraphPaths, runs: list[PreparedRun], millis: float) -> Trial:
    manifest = ExpertStore(layout).manifest()
    found = contents(layout)
    wanted = {number: number for number in range(1, MERGERS + 1)}
    wanted[0] = BASE_FRAMES + 10 * MERGERS  # the most frames, in whatever order they came
    lost = [expert for expert, frames in wanted.items() if found.get(expert, (0,))[0] != frames]
    missing = {run.run.run_id for run in runs} - set(manifest.merged)
    return Trial(
        fault="six mergers at once, each kill -9",
        millis=millis,
        lost=len(lost) + len(missing),
        merged_twice=manifest.generation - len(set(manifest.merged)),
        left_over=len([*layout.training_runs.glob("skill_*"), *layout.root.rglob("*.trash")]),
    )
