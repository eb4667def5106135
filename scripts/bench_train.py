"""How fast one run trains: `python scripts/bench_train.py "Make Wood Pickaxe" --num_envs 256`.

Prints seconds to compile and steps per second of whole updates on the real environment, with the
plan's experts untrained. Takes every flag of the trainer but --module_path.
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np

from flowrl.config import PPOConfig, TrainConfig, parse
from flowrl.envs.skill_module import load_module
from flowrl.layout import RunLayout
from flowrl.parallel.training_setup import generate_module_with_remapping
from flowrl.rl import program
from flowrl.rl.assignment import read_assignment
from flowrl.rl.drafts import begin_programs
from flowrl.rl.train import frames_per_update, update
from flowrl.runs import PlannedStep, TrainingRun
from flowrl.skills.graph import SkillGraph
from flowrl.skills.skill import load_library

UPDATES = 10


def run_folder(folder: Path, skill: str, config: PPOConfig) -> RunLayout:
    library = load_library(config.env_name, None)
    steps = SkillGraph(library.values()).plan(skill)
    experts = {name: number for number, name in enumerate(dict.fromkeys(s.skill for s in steps))}
    run = TrainingRun(
        run_id="bench",
        skill=skill,
        expert=experts[skill],
        attempt=1,
        plan=tuple(
            PlannedStep(skill=s.skill, count=s.count, expert=experts[s.skill]) for s in steps
        ),
        experts=tuple(experts.values()),
        ancestors=(),
        config={"env_name": config.env_name},
    )
    layout = RunLayout(folder, run.expert)
    layout.module.write_text(generate_module_with_remapping(run, library))
    return layout


def main() -> None:
    skill, *words = sys.argv[1:] or ["Collect Wood"]
    flags = parse(PPOConfig, words)
    with tempfile.TemporaryDirectory() as folder:
        layout = run_folder(Path(folder), skill, flags)
        config = TrainConfig(**asdict(flags), module_path=layout.module)
        program.use_compile_cache(config.compile_cache)
        module = load_module(layout.module)
        env = program.open_env(config, module)
        learner = program.prepare(read_assignment(config, module), config, env).learner
    rate = np.float32(config.lr)
    began = time.perf_counter()
    programs = begin_programs(env, config)
    print(f"{env.num_experts} experts, {env.num_tasks} tasks, {config.num_envs} environments")
    print(f"compile {time.perf_counter() - began:.1f} s")
    seconds = []
    for _ in range(UPDATES):
        began = time.perf_counter()
        learner, _ = update(env, programs, learner, rate)
        seconds.append(time.perf_counter() - began)
    for name, value in (("best", min(seconds)), ("median", sorted(seconds)[UPDATES // 2])):
        print(
            f"{name} update {value * 1e3:.0f} ms, {frames_per_update(config) / value:,.0f} steps/s"
        )


if __name__ == "__main__":
    main()
