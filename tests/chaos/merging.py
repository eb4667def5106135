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
    graph_paths = GraphPaths(folder / "graph")
    runs = six_finished_runs(graph_paths)
    living = {number: (merger(graph_paths, runs[number]), True) for number in range(MERGERS)}
    began = time.monotonic()
    while living:
        number = chance.choice(list(living))
        process, to_kill = living.pop(number)
        if to_kill:
            time.sleep(chance.uniform(0.0, 0.3))
            process.kill()
        if process.wait(timeout=120) != 0:
            living[number] = (merger(graph_paths, runs[number]), False)
    millis = 1000 * (time.monotonic() - began)
    recover_graph(graph_paths)
    return [judged(graph_paths, runs, millis)]


def six_finished_runs(graph_paths: GraphPaths) -> list[PreparedRun]:
    skills = [make_skill(f"Skill {n}", needs=("base",), gain=f"gain_{n}") for n in range(MERGERS)]
    graph = SkillGraph([make_skill("Base", gain="base"), *skills])
    base = prepare(graph_paths, "Base", 0, {}, graph=graph)
    finish(base.run_paths, {0: BASE_FRAMES})
    merge(graph_paths, base)
    runs = []
    for number, skill in enumerate(skills, start=1):
        run = prepare(graph_paths, skill.name, number, {"Base": 0}, graph=graph)
        finish(run.run_paths, {0: 10 * number, number: number})
        runs.append(run)
    return runs


def merger(graph_paths: GraphPaths, run: PreparedRun) -> subprocess.Popen[bytes]:
    words = (graph_paths.root, run.run_folder, run.run.expert, run.run.skill)
    return subprocess.Popen(
        [sys.executable, "-m", "tests.chaos.merge_once", *map(str, words)], cwd=ROOT
    )


def judged(graph_paths: GraphPaths, runs: list[PreparedRun], millis: float) -> Trial:
    manifest = ExpertStore(graph_paths).manifest()
    found = contents(graph_paths)
    wanted = {number: number for number in range(1, MERGERS + 1)}
    wanted[0] = BASE_FRAMES + 10 * MERGERS  # the most frames, in whatever order they came
    lost = [expert for expert, frames in wanted.items() if found.get(expert, (0,))[0] != frames]
    missing = {run.run.run_id for run in runs} - set(manifest.merged)
    return Trial(
        fault="six mergers at once, each kill -9",
        millis=millis,
        lost=len(lost) + len(missing),
        merged_twice=manifest.generation - len(set(manifest.merged)),
        left_over=len(
            [*graph_paths.training_runs.glob("skill_*"), *graph_paths.root.rglob("*.trash")]
        ),
    )
