"""How fast one run trains: `python scripts/bench_train.py "Make Wood Pickaxe" --num_envs 256`.

Prints seconds until the programs are there and steps per second of whole updates, with the plan's
experts untrained. Takes every flag of the trainer but --module_path. `bench_ppo.py` compares with
a baseline.
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from training_cases import opened, planned

from flowrl.command_line import parse
from flowrl.config import PPOConfig
from flowrl.ppo.loop import frames_per_update, update
from flowrl.ppo.loss import Hyperparameters

UPDATES = 10


def main() -> None:
    skill, *words = sys.argv[1:] or ["Collect Wood"]
    if skill.startswith("-"):  # --help, or a flag
        skill, words = "Collect Wood", [skill, *words]
    config = parse(PPOConfig, words)
    began = time.perf_counter()
    run = opened(planned(skill, config), config)
    run.programs.wait()
    print(f"{run.env.num_experts} experts, {run.env.num_tasks} tasks, {config.num_envs} envs")
    print(f"ready after {time.perf_counter() - began:.1f} s")
    learner, seconds = run.learner, []
    threads = ThreadPoolExecutor(len(learner.shards))
    hyper = Hyperparameters.of(config, np.full(run.env.num_experts, config.lr))
    for _ in range(UPDATES):
        began = time.perf_counter()
        learner, _ = update(run.env, run.programs, learner, hyper, threads=threads)
        seconds.append(time.perf_counter() - began)
    for name, value in (("best", min(seconds)), ("median", sorted(seconds)[UPDATES // 2])):
        print(
            f"{name} update {value * 1e3:.0f} ms, {frames_per_update(config) / value:,.0f} steps/s"
        )


if __name__ == "__main__":
    main()
