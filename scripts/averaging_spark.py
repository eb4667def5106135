"""Rounds of Spark beside the way that collects all agents' weights; rows of bench_averaging.py."""

from __future__ import annotations

import asyncio
import sys

import numpy as np
from benchmarking import Row, paired

from flowrl.averaging import SparkDistributedTrainer, simple_loss_function
from flowrl.errors import ConfigError

AGENTS, WEIGHTS, ROUNDS, STEPS, RATE = 1000, 1000, 3, 5, 0.05


def spark_rows(*, small: bool = False) -> list[Row]:
    """The rows of rounds over Spark; none, with a line on stderr, where it cannot be used."""
    try:
        trainer = SparkDistributedTrainer(num_agents=AGENTS)
    except ConfigError as error:
        sys.stderr.write(f"no rows of Spark: {error}\n")
        return []
    context = trainer._context
    weights = [*np.random.default_rng(0).normal(size=(AGENTS, WEIGHTS))]

    def rounds() -> None:
        trainer.initialize_weights(np.ones(WEIGHTS), noise=0.5)
        asyncio.run(trainer.train(simple_loss_function, ROUNDS * STEPS, RATE, STEPS))

    def collected() -> None:
        agents = weights
        for _ in range(ROUNDS):
            found = context.parallelize(agents, 2).map(steps).collect()
            agents = [np.mean(found, axis=0)] * AGENTS

    def steps(agent: np.ndarray) -> np.ndarray:
        for _ in range(STEPS):
            agent = agent - RATE * simple_loss_function(agent)[1]
        return agent

    rounds()
    ours = sent_of_last_job(context)
    collected()
    baseline = sent_of_last_job(context)
    pair = paired(rounds, collected, rounds=1 if small else 5, warmups=0)
    trainer.stop()
    case = "spark 1000"
    ratio = baseline / ours
    sizes = Row(
        case=f"{case}, to the driver", ours=ours, baseline=baseline, unit="bytes", ratio=ratio
    )
    return [pair.row(f"{case}, {ROUNDS} rounds"), sizes]


def sent_of_last_job(context) -> int:
    """The bytes of results that the tasks of the newest job sent to the driver."""
    tracker, store = context.statusTracker(), context._jsc.sc().statusStore()
    stages = tracker.getJobInfo(max(tracker.getJobIdsForGroup(None))).stageIds
    tasks = [store.taskList(stage, 0, AGENTS) for stage in stages]
    each = [stage.apply(number) for stage in tasks for number in range(stage.size())]
    return sum(task.taskMetrics().get().resultSize() for task in each)
