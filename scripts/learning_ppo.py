"""How soon flowrl learns: environment steps and seconds until 80 % of the episodes succeed.

Both sides learn the same plan with the same rewards, networks and PPO settings, from several
seeds. The share is that of the newest updates in which 200 episodes ended. flowrl's own trainer
asks for more before it stops, since episodes that end early are mostly the successful ones
(`flowrl.ppo.metrics`); where it stops is a line of its own.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import jax
import numpy as np
from baseline_envs import TaskEnv
from baseline_ppo import Baseline
from benchmarking import Row
from training_cases import opened

from flowrl.config import PPOConfig
from flowrl.ppo.loop import learning_rate, update
from flowrl.ppo.loss import Hyperparameters
from flowrl.ppo.metrics import EpisodeLog
from flowrl.runs import PlannedStep

ENOUGH = 0.8
EPISODES = 200
MOST_UPDATES = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """Something to learn; `expected` is the prototype's slowest of three seeds, in steps."""

    name: str
    plan: tuple[PlannedStep, ...]
    expected: int


@dataclass(frozen=True, slots=True)
class Reached:
    """When the share was enough."""

    steps: int
    seconds: float


def _plan(*steps: tuple[str, int]) -> tuple[PlannedStep, ...]:
    """One expert does all."""
    return tuple(PlannedStep(skill=skill, count=count, expert=0) for skill, count in steps)


GOALS = (
    Goal(name="1 wood", plan=_plan(("Collect Wood", 1)), expected=45_000),
    Goal(name="sapling", plan=_plan(("Collect Sapling", 1)), expected=53_000),
    Goal(name="table", plan=_plan(("Collect Wood", 2), ("Place Table", 1)), expected=86_000),
    Goal(name="4 wood", plan=_plan(("Collect Wood", 4)), expected=106_000),
)


class Newest:
    """The share of success in the newest updates in which enough episodes ended."""

    def __init__(self) -> None:
        self._updates: list[tuple[int, float]] = []

    def add(self, ended: int, succeeded: float) -> bool:
        """Take in an update; whether the share is enough now."""
        self._updates.insert(0, (ended, succeeded))
        episodes, successes = 0, 0.0
        for number, share in self._updates:
            episodes, successes = episodes + number, successes + share
            if episodes >= EPISODES:
                return successes >= ENOUGH * episodes
        return False


def learning_rows(*, seeds: int, small: bool) -> list[Row]:
    """Two rows against the baseline for each goal, one against the prototype, one of the stop."""
    rows = []
    for goal in GOALS[:1] if small else GOALS:
        found = [_ours(goal, seed) for seed in range(seeds)]
        ours, stops = [reached for reached, _ in found], [stop for _, stop in found]
        baseline = list(_baseline(goal, seeds))
        print(f"{goal.name}: {ours}, stops {stops}\n  baseline: {baseline}", flush=True)
        steps, their_steps = (_median([r.steps for r in side]) for side in (ours, baseline))
        took, their_took = (_median([r.seconds for r in side]) for side in (ours, baseline))
        most = max(reached.steps for reached in ours)
        rows += [
            _row(f"{goal.name} steps", steps, their_steps, "steps"),
            _row(f"{goal.name} seconds", took, their_took, "s"),
            _row(f"{goal.name} slowest seed, prototype's", most, goal.expected, "steps"),
            Row(case=f"{goal.name} stop", ours=_median(stops), unit="steps"),
        ]
    return rows


def _row(case: str, ours: float, baseline: float, unit: str) -> Row:
    return Row(case=case, ours=ours, baseline=baseline, unit=unit, ratio=baseline / ours)


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)


def _ours(goal: Goal, seed: int) -> tuple[Reached, int]:
    """When the share was enough, and the steps at which flowrl's own trainer would stop."""
    run = opened(goal.plan, PPOConfig(seed=seed, sight=False, egocentric=False))
    config, env, learner = run.config, run.env, run.learner
    run.programs.wait()
    newest, episodes = Newest(), EpisodeLog(config.num_envs, env.num_tasks)
    threads = ThreadPoolExecutor(len(learner.shards))
    reached, began = None, time.perf_counter()
    for number in range(MOST_UPDATES):
        rates = np.full(env.num_experts, learning_rate(config, number))
        hyper = Hyperparameters.of(config, rates)
        learner, stats = update(env, run.programs, learner, hyper, threads=threads)
        success = stats.task_success[..., env.num_tasks - 1]
        steps = (number + 1) * stats.done.size
        if newest.add(int(stats.done.sum()), float(success[stats.done].sum())) and not reached:
            reached = Reached(steps, time.perf_counter() - began)
        episodes.add(
            done=stats.done,
            task_success=stats.task_success[..., : env.num_tasks],
            length=stats.episode_length,
            total=stats.episode_return,
        )
        if reached and episodes.rates().reach(ENOUGH):
            return reached, steps
    raise SystemExit(f"{goal.name}, seed {seed}: not learnt in {MOST_UPDATES} updates")


def _baseline(goal: Goal, seeds: int) -> Iterator[Reached]:
    run = opened(goal.plan, PPOConfig(sight=False, egocentric=False))
    baseline = Baseline(TaskEnv(run.module, run.config), run.config, updates=1)
    for seed in range(seeds):
        baseline.begin(seed)
        newest, began = Newest(), time.perf_counter()
        for number in range(MOST_UPDATES):
            baseline()
            jax.effects_barrier()
            metric = baseline.logged[-1]
            ended = int(metric["ended"])
            if newest.add(ended, metric["success"] * ended if ended else 0.0):
                steps = (number + 1) * run.config.num_envs * run.config.num_steps
                yield Reached(steps, time.perf_counter() - began)
                break
        else:
            raise SystemExit(f"{goal.name}: the baseline needs more than {MOST_UPDATES} updates")
