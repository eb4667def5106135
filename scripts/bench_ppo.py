"""Whole training: flowrl's trainer and a baseline like the public Craftax PPO, in turns.

python scripts/bench_ppo.py [--small] [--json FILE] [--case CASE …]
python scripts/bench_ppo.py --learning [--seeds 3] [--small] [--json FILE]

The first form compares environment steps per second of whole updates. Both sides train the same
plan with the same sizes, rewards and PPO settings, from fresh networks on: "Eat Cow", whose
episodes are long because it is learnt slowly, or a tour with an expert for each of its sixteen
legs, begun evenly along it.

The second form counts the steps until 80 % of the newest 200 episodes succeed (`learning_ppo`).
"""

from __future__ import annotations

import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import jax
import numpy as np
from baseline_envs import TaskEnv
from baseline_ppo import Baseline
from benchmarking import Row, arguments, paired, report
from learning_ppo import learning_rows
from training_cases import Opened, opened, planned, spread, tour

from flowrl.config import PPOConfig
from flowrl.ppo.loop import Counters, UpdateReport, train
from flowrl.ppo.loss import Hyperparameters
from flowrl.ppo.rollout import RolloutState
from flowrl.runs import PlannedStep

SKILL = "Eat Cow"
UPDATES = 3  # per round


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One line of the table."""

    name: str
    num_envs: int
    width: int
    experts: int = 1

    @property
    def config(self) -> PPOConfig:
        # The baseline sees the game's observation alone. A share above 1 is never reached.
        sizes = PPOConfig(num_envs=self.num_envs, layer_size=self.width)
        return replace(sizes, sight=False, egocentric=False, success_state_rate=2.0)

    @property
    def plan(self) -> tuple[PlannedStep, ...]:
        return planned(SKILL, self.config) if self.experts == 1 else tour(self.experts)


CASES = (
    Case(name="64x64", num_envs=64, width=64),
    Case(name="256x64", num_envs=256, width=64),
    Case(name="64x64 E=16", num_envs=64, width=64, experts=16),
)


class Ours:
    """flowrl's trainer, some updates at a time."""

    update: UpdateReport

    def __init__(self, run: Opened) -> None:
        shards = tuple(_along(run, shard) for shard in run.learner.shards)
        self._updates = train(
            run.env,
            run.config,
            run.programs,
            learner=run.learner._replace(shards=shards),
            counters=Counters(acted=(0,) * run.env.num_experts),
        )

    def __call__(self) -> None:
        for _ in range(UPDATES):
            self.update = next(self._updates)
        jax.block_until_ready(self.update.learner)


def _along(run: Opened, shard: RolloutState) -> RolloutState:
    """A shard of environments with its episodes begun evenly along the plan."""
    walk = shard.env.walk
    walk = walk._replace(task=spread(walk.task, run.plan))
    return shard._replace(env=shard.env._replace(walk=walk))


def measured(case: Case, *, rounds: int) -> list[Row]:
    """The case's row, and one for each part of flowrl's update."""
    run = opened(case.plan, case.config)
    ours = Ours(run)
    baseline = Baseline(TaskEnv(run.module, run.config), run.config, updates=UPDATES)
    baseline.place(lambda task: spread(task, run.plan))
    pair = paired(ours, baseline, rounds=rounds)
    steps = UPDATES * case.num_envs * case.config.num_steps
    rows = [pair.rate_row(case.name, work=steps, unit="steps/s")]
    return rows + _parts(case.name, run, ours.update, updates=2 * rounds)


def _parts(case: str, run: Opened, last: UpdateReport, *, updates: int) -> list[Row]:
    """What one of flowrl's updates consists of; the learner of `last` is donated."""
    env, programs = run.env, run.programs
    state, shards = last.learner
    rates, go_on = np.full(env.num_experts, run.config.lr), np.zeros(1, np.int32)
    hyper = Hyperparameters.of(run.config, rates)
    seconds: dict[str, list[float]] = {"acting": [], "learning": [], "restocking": []}
    threads = ThreadPoolExecutor(len(shards))
    for _ in range(updates):
        clock = [time.perf_counter()]
        padded = programs.pad(state.params)
        found = jax.block_until_ready(list(threads.map(partial(programs.act, padded), shards)))
        clock.append(time.perf_counter())
        learnt = programs.learn(state, tuple(batch for _, batch, _ in found), hyper, go_on)
        state, _ = jax.block_until_ready(learnt)
        clock.append(time.perf_counter())
        envs = threads.map(env.restock, [key for *_, key in found], [g.env for g, *_ in found])
        envs = jax.block_until_ready(list(envs))
        shards = [shard._replace(env=env) for (shard, *_), env in zip(found, envs, strict=True)]
        clock.append(time.perf_counter())
        for part, began, ended in zip(seconds, clock, clock[1:], strict=False):
            seconds[part].append(ended - began)
    return [
        Row(case=f"{case} {part}", ours=1e3 * statistics.median(found), unit="ms an update")
        for part, found in seconds.items()
    ]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--case", nargs="*", help="of the cases only these")
    parser.add_argument("--learning", action="store_true", help="steps to 80 %% success")
    parser.add_argument("--seeds", type=int, default=3, help="of --learning")
    args = parser.parse_args()
    if args.learning:
        seeds = 1 if args.small else args.seeds
        report("ppo-learning", learning_rows(seeds=seeds, small=args.small), args.json)
        return
    chosen = [case for case in CASES if args.case is None or case.name in args.case]
    cases, rounds = (chosen[:1], 2) if args.small else (chosen, 6)
    rows = [row for case in cases for row in measured(case, rounds=rounds)]
    report("ppo", rows, args.json)


if __name__ == "__main__":
    main()
