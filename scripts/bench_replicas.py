"""What replicas of a skill cost: `python scripts/bench_replicas.py [--seeds 10] [--json FILE]`.

The first row is the averager's part of a round: it reads three offers of 1 MB, averages them and
makes the round durable. With `--seeds N` "Collect Wood" is learned until 80 % of recent episodes
succeed, by four replicas and by one trainer, from the same random numbers; a row holds the
environment steps of both, all replicas together, and the last rows the mean ratio of them. Each
round waits for all replicas, so that no figure depends on the machine's load. That a run got there
is said by its result, so a seed that spent its steps without is counted with all of them, and
named. Replicas count steps at rounds only, so theirs are a multiple of a round's.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from benchmarking import Row, arguments, report
from scipy.stats import sem, t

from flowrl.averaging.rules import Rule
from flowrl.command_line import to_argv
from flowrl.config import PPOConfig
from flowrl.parallel.training_setup import prepare_training_run
from flowrl.paths import GraphPaths
from flowrl.rates import Rates
from flowrl.replicas.rounds import Offer, Round, Rounds, fold
from flowrl.runs import RunResult, read_result
from flowrl.skills.graph import SkillGraph
from flowrl.skills.skill import load_library

WOOD, REPLICAS = "Collect Wood", 4
CONFIG = PPOConfig(total_timesteps=2_000_000, success_state_rate=0.8)
RATES = Rates(
    step_success=(0.5,), mean_episode_length=9.0, mean_episode_return=0.5, episodes=9, full=True
)


def round_row(folder: Path, *, replicas: int = 3, repeats: int = 9) -> Row:
    """The time in which an averager makes a round of so many offers of 1 MB."""
    rounds, random = Rounds(folder / "rounds"), np.random.default_rng(0)
    mean = {"kernel": random.normal(size=(4, 2**16)).astype(np.float32)}
    base = rounds.commit(Round(number=0, acted=(0,) * 4), mean)
    seconds = []
    for number in range(1, repeats + 1):
        for replica in range(replicas):
            offer = Offer(replica=replica, base=base.digest, acted=(9,) * 4, rates=RATES)
            rounds.offer(number, offer, {"kernel": mean["kernel"] + replica}, {})
        began = time.perf_counter()
        before = rounds.mean(base)
        offers = {k: rounds.read_offer(base, k, before) for k in range(replicas)}
        members = tuple(offer for offer, _ in offers.values())
        record = Round(number=number, members=members, acted=base.acted)
        base = rounds.commit(record, fold(before, offers, Rule()))
        seconds.append(time.perf_counter() - began)
    case = f"round of {replicas} replicas, 1 MB"
    return Row(case=case, ours=1e3 * statistics.median(seconds), unit="ms")


def trained(folder: Path, config: PPOConfig) -> RunResult:
    """Train the skill in a new graph; returns its result."""
    ready = prepare_training_run(
        graph_paths=GraphPaths(folder),
        graph=SkillGraph([load_library(config.env_name)[WOOD]]),
        skill=WOOD,
        expert=0,
        attempt=1,
        completed={},
        config=config,
    )
    module = ("--module_path", str(ready.run_paths.module))
    command = (sys.executable, "-m", "flowrl.ppo_flow", *module, *to_argv(config))
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    subprocess.run(command, env=env, check=True, stderr=subprocess.DEVNULL)
    return read_result(ready.run_paths)


def learning_rows(folder: Path, seeds: range, every: list[int]) -> list[Row]:
    """Steps until the success rate is reached, for each seed and number of updates of a round."""
    rows = []
    for seed in seeds:
        one = replace(CONFIG, seed=seed)
        alone = trained(folder / f"{seed}", one)
        for updates in every:
            several = replace(one, replicas=REPLICAS, average_every=updates, average_deadline=1e6)
            found = trained(folder / f"{seed}.{updates}", several)
            short = "" if alone.stopped_early and found.stopped_early else ", steps spent"
            ratio = alone.frames / found.frames
            case = f"{WOOD}, {REPLICAS} replicas every {updates}, seed {seed}{short}"
            row = Row(
                case=case, ours=found.frames, baseline=alone.frames, unit="steps", ratio=ratio
            )
            rows.append(row)
            print(row, flush=True)
    return rows + [mean_row(rows, updates) for updates in every if len(seeds) > 1]


def mean_row(rows: list[Row], updates: int) -> Row:
    """The mean over all seeds of replicas' steps over one trainer's, with Student's interval."""
    ratios = [1 / row.ratio for row in rows if f"every {updates}," in row.case and row.ratio]
    mean, error = statistics.mean(ratios), sem(ratios) * t.ppf(0.975, len(ratios) - 1)
    interval = f"{mean - error:.2f} to {mean + error:.2f}"
    case = f"{WOOD}, {REPLICAS} replicas every {updates}: mean of {len(ratios)}, 95 %: {interval}"
    return Row(case=case, ours=mean, unit="steps over one trainer's")


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--seeds", type=int, default=0, help="of learning; minutes for each")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--every", type=int, nargs="+", default=[5, 1], help="updates of a round")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = [round_row(folder, repeats=3 if args.small else 9)]
        seeds = range(args.first, args.first + args.seeds)
        rows += learning_rows(folder, seeds, args.every)
    report("replicas", rows, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
