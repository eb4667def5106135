"""Rounds of averaging over Spark: one job per round, the agents' states in files.

Each task of a job trains a part of the agents, publishes their states, and returns their sum; the
mean of all goes to the next job as a broadcast. A part's states are published once for a round: if
Spark runs a task twice, the second one takes what it finds. The driver adds the parts' sums in f64
and in their order, so the mean has the same bits in whatever order tasks end; Spark's own tree of
sums does not keep them. Sums travel as the bytes of an `AgentState`, but Spark itself pickles
functions and rows: whoever reaches its ports can run code, so its network must be trusted.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flowrl import storage
from flowrl.averaging.state import AgentState, Tree, from_row, to_row
from flowrl.averaging.trainer import DistributedTrainer, LossFunction
from flowrl.errors import ConfigError, FileRefusedError, TrainingError

_FILE, _PREFIX = "agents.json", "flowrl-rounds-"
_SETTINGS = {
    "spark.app.name": "flowrl",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.network.timeout": "600s",
    "spark.executor.heartbeatInterval": "60s",
}
_LOOPBACK = dict.fromkeys(["spark.driver.host", "spark.driver.bindAddress"], "127.0.0.1")


@dataclass(frozen=True, slots=True)
class PartTask:
    """The work of a task in a round; the agents' states are in `folder` by round and part."""

    folder: Path
    round: int
    loss_fn: LossFunction
    steps: int
    learning_rate: float

    def run(self, part: int, mean: bytes) -> bytes:
        """Train a part's agents from the round before, unless another try did; their sum.

        `mean` is empty or, as an AgentState, the weights from which all go on. The sum f64 `[d]`
        is one with the number of `members`, those `missed` for NaN, and those `left_out`.
        """
        place = self.folder / str(self.round) / str(part)
        if not place.exists():
            agents = DistributedTrainer.load(self.folder / str(self.round - 1) / str(part) / _FILE)
            if mean:
                _set_weights(agents, AgentState.from_bytes(mean).weights)
            with suppress(TrainingError):  # all of them raised, and are left out
                rounds = agents.train(self.loss_fn, self.steps, self.learning_rate, self.steps + 1)
                asyncio.run(rounds)
            publish(agents, place)
        return _sum(DistributedTrainer.load(place / _FILE)).to_bytes()


def publish(agents: DistributedTrainer, place: Path) -> None:
    """Write agents' states to a folder that then never changes, unless another try was faster."""
    # Two tries may write at once, so each has a folder of its own name.
    prepared = Path(tempfile.mkdtemp(prefix=".tmp-", dir=storage.make_dir(place.parent)))
    agents.save(prepared / _FILE)
    try:
        storage.commit_dir(prepared, place)
    except (FileRefusedError, OSError):
        if not place.exists():
            raise
        storage.remove_tree(prepared)


def _set_weights(agents: DistributedTrainer, weights: Tree) -> None:
    for agent in agents.get_all_agents():
        if agent.agent_id not in agents.left_out:
            agent.set_weights(weights)


def _sum(agents: DistributedTrainer) -> AgentState:
    weights = {each.agent_id: each.get_state().weights for each in agents.get_all_agents()}
    rows = {name: to_row(tree, tree) for name, tree in weights.items()}
    counted = [name for name in rows if name not in agents.left_out]
    missed = [name for name in counted if not np.isfinite(rows[name]).all()]
    members = [name for name in counted if name not in missed]
    none = np.zeros_like(next(iter(rows.values())))
    total = np.sum([none, *(rows[name] for name in members)], axis=0)
    metadata = {"members": len(members), "missed": missed, "left_out": agents.left_out}
    return AgentState(agent_id="sum", weights=total, metadata=metadata)


class SparkDistributedTrainer(DistributedTrainer):
    """Trains agents in Spark's tasks; one that raises is left out and named.

    It opens a session, which `stop` ends, or takes the SparkContext of one, which it never ends.
    `train` begins and ends with all states in files of `folder`, a disk that all workers share (on
    one machine a temporary folder is the default), which is one trainer's until `stop`. A history
    gets one loss in a round. Spark's `spark.default.parallelism` is the number of parts, by default
    that of its cores; another one gives other last bits.

    What `loss_fn` imports must be installed on all workers. If a job fails, by TrainingError, the
    agents keep the round before it.
    """

    def __init__(
        self,
        agent_ids: Sequence[str] | None = None,
        spark_master: Any = None,
        *,
        folder: Path | None = None,
        **kept: Any,
    ) -> None:
        super().__init__(agent_ids, **kept)
        given: Any = spark_master or "local[2]"
        self._owned = isinstance(given, str)
        master = str(given if self._owned else given.master)
        if folder is None and not master.startswith("local"):
            raise ConfigError(f"workers of {master} need folder=, a path that all of them share")
        for other in folder.glob(f"{_PREFIX}*") if folder else ():
            raise ConfigError(f"{other} is of a trainer that runs or was killed; name another one")
        self._context: Any = _open_session(master) if self._owned else given
        within = folder and storage.make_dir(folder)
        self._folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=within)).resolve()
        self._round = 0  # the newest that was begun

    def stop(self) -> None:
        """Remove the rounds' files, and end the session if this trainer opened it."""
        storage.remove_tree(self._folder)
        if self._owned:
            with suppress(TrainingError), _in_one_line("stop"):  # its Java process may be gone
                self._context.stop()

    async def _train(
        self, loss_fn: LossFunction, iterations: int, learning_rate: float, sync_interval: int
    ) -> None:
        parts, like = self._deal()
        done, mean = self._round, None
        try:
            for first in range(0, iterations, sync_interval):
                steps, self._round = min(sync_interval, iterations - first), self._round + 1
                task = PartTask(self._folder, self._round, loss_fn, steps, learning_rate)
                sums = await asyncio.to_thread(self._run_job, task, parts, mean)
                storage.remove_tree(self._folder / str(done))
                done, mean = task.round, None
                for each in sums:
                    self.left_out |= each.metadata["left_out"]
                self._check_left()
                mean = self._mean(sums, like) if steps == sync_interval else None
        finally:
            self._take(parts, done)
            if mean is not None:
                _set_weights(self, mean)

    def _deal(self) -> tuple[int, Tree]:
        """Write the agents' states as those of a round; returns the number of parts, one's tree."""
        left = {name: each for name, each in self._agents.items() if name not in self.left_out}
        trees = [each.get_state().weights for each in left.values()]
        for tree in trees:
            to_row(tree, trees[0])
        self._round += 1
        with _in_one_line("Spark"):
            parts = min(self._context.defaultParallelism, len(left))
        for part in range(parts):
            agents = DistributedTrainer([*left][part::parts])
            agents._agents = {name: left[name] for name in agents._agents}
            publish(agents, self._folder / str(self._round) / str(part))
        return parts, trees[0]

    def _run_job(self, task: PartTask, parts: int, mean: Tree | None) -> list[AgentState]:
        sent = b"" if mean is None else AgentState(agent_id="mean", weights=mean).to_bytes()
        with _in_one_line(f"Spark's job of round {task.round}"):
            shared = self._context.broadcast(sent)
            dealt = self._context.parallelize(range(parts), parts)
            try:
                sums = dealt.map(lambda part: task.run(part, shared.value)).collect()
            finally:
                shared.destroy()
        return [AgentState.from_bytes(each) for each in sums]

    def _mean(self, sums: Sequence[AgentState], like: Tree) -> Tree:
        members = sum(each.metadata["members"] for each in sums)
        if not members:
            raise TrainingError("no agent's weights are finite; lower learning_rate")
        for name in [name for each in sums for name in each.metadata["missed"]]:
            self.get_agent(name).rounds_missed += 1
        return from_row(np.sum([each.weights for each in sums], axis=0) / members, like)

    def _take(self, parts: int, round: int) -> None:
        """Take the agents' states after a round, and remove its files."""
        files = [self._folder / str(round) / str(part) / _FILE for part in range(parts)]
        for agents in [DistributedTrainer.load(file) for file in files]:  # all or none
            for agent in agents.get_all_agents():
                mine, state = self.get_agent(agent.agent_id), agent.get_state()
                mine._state = state
                mine.history.extend([] if state.loss is None else [state.loss])
        storage.remove_tree(self._folder / str(round))


@contextmanager
def _in_one_line(what: str) -> Iterator[None]:
    """Raise TrainingError for what a session raises, without its tracebacks."""
    from py4j.protocol import Py4JError, Py4JJavaError  # pyright: ignore[reportMissingImports]

    try:
        yield
    except Py4JJavaError as error:
        said = str(error.java_exception.getMessage()).splitlines()
        lines = (line for line in said if line[:1].strip() and not line.endswith("call last):"))
        raise TrainingError(f"{what} failed: {next(lines, ''):.300}") from error
    except (Py4JError, OSError) as error:
        why = f"its Java process is gone ({error}); save the agents and go on in a new process"
        raise TrainingError(f"{what} failed: {why}") from error


def _open_session(master: str) -> Any:
    """A SparkContext of our own, on the loopback if Spark runs on this machine alone."""
    try:
        from py4j.protocol import Py4JError  # pyright: ignore[reportMissingImports]
        from pyspark import SparkConf, SparkContext  # pyright: ignore[reportMissingImports]
        from pyspark.errors import PySparkRuntimeError  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError("Spark is missing: pip install '.[spark]' in flowrl's folder") from error
    conf = SparkConf().setMaster(master)
    for name, value in (_SETTINGS | (_LOOPBACK if master.startswith("local") else {})).items():
        conf.setIfMissing(name, value)
    try:
        context = SparkContext(conf=conf)
    except ValueError as error:
        remedy = "give its SparkContext as spark_master"
        raise ConfigError(f"this process has a Spark session already; {remedy}") from error
    except (Py4JError, PySparkRuntimeError, OSError) as error:
        line = " ".join(str(error).split())[:200]
        raise ConfigError(f"Spark needs Java 17 and a master, not {master!r}: {line}") from error
    context.pythonExec = os.environ.get("PYSPARK_PYTHON", sys.executable)
    return context
