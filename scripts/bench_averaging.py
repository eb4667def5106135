"""What a round of averaging costs: `python scripts/bench_averaging.py [--case NAME ...]`.

A round of the local coordinator stands beside what agents do without one: each puts its weights
into a queue of each other agent, takes those of the others from its own, and averages them. A
second row does so by the coordinator's own messages. A state as JSON, and back, stands beside the
same state with lists of numbers. Rounds of 10,000 agents stand beside rounds of 1,000, so their
ratio is below 1. The row of results counts how many different ones the agents got. The rows of MPI
and Spark are described in averaging_ranks.py and averaging_spark.py, that of replicas in
bench_replicas.py; an engine that is not installed gives no row and says so.
"""

from __future__ import annotations

import asyncio
import gc
import json
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from averaging_ranks import mpi_rows
from averaging_spark import spark_rows
from bench_replicas import round_row
from benchmarking import Row, arguments, paired, report

from flowrl.averaging import AgentState, Averaged, LocalSyncCoordinator, SyncMessage

WEIGHTS, FLOATS = 100, 10**6
Agents = dict[str, np.ndarray]


class Group:
    """Agents of one coordinator, each with weights of its own."""

    def __init__(self, runner: asyncio.Runner, agents: int) -> None:
        random = np.random.default_rng(0)
        names = [f"agent{number}" for number in range(agents)]
        self._runner = runner
        self._agents = {name: random.normal(size=WEIGHTS) for name in names}
        self._coordinator = LocalSyncCoordinator(queue_bound=agents)
        self._queues = {name: asyncio.Queue[np.ndarray]() for name in names}
        self._round = 0
        for name in names:
            self._coordinator.join(name)

    def one_round(self) -> int:
        """Average by a round; returns how many different results the agents got."""
        self._round += 1
        mean = self._coordinator.mean
        offers = [mean(name, self._round, weights) for name, weights in self._agents.items()]
        return self._runner.run(_results(offers))

    def by_queues(self) -> int:
        """Average by a queue for each agent; returns how many different results they got."""
        self._runner.run(_results([self._put(name) for name in self._agents]))
        return self._runner.run(_results([self._get(name) for name in self._agents]))

    async def _put(self, name: str) -> None:
        for other, queue in self._queues.items():
            if other != name:
                await queue.put(self._agents[name])

    async def _get(self, name: str) -> np.ndarray:
        others = [await self._queues[name].get() for _ in range(len(self._agents) - 1)]
        return np.mean([self._agents[name], *others], axis=0)

    def by_messages(self) -> int:
        """Average by broadcasts; returns how many different results the agents got."""
        self._runner.run(_results([self._broadcast(name) for name in self._agents]))
        return self._runner.run(_results([self._gather(name) for name in self._agents]))

    async def _broadcast(self, name: str) -> None:
        payload = {"weights": self._agents[name]}
        message = SyncMessage(source_id=name, message_type="weights", payload=payload)
        await self._coordinator.broadcast(message)

    async def _gather(self, name: str) -> np.ndarray:
        others = await self._coordinator.gather(name)
        return np.mean([self._agents[name], *(each.payload["weights"] for each in others)], axis=0)


async def _results(waiting: Sequence) -> int:
    """Wait for all; returns how many different trees there are."""
    found = await asyncio.gather(*waiting)
    trees = [each.tree if isinstance(each, Averaged) else each for each in found]
    return len({tree.tobytes() for tree in trees if tree is not None})


def local_rows(*, small: bool = False) -> list[Row]:
    """Rounds of 1,000 agents beside messages, and of 10,000 beside 1,000."""
    rounds = 3 if small else 7
    with asyncio.Runner() as runner:
        some, many = Group(runner, 1000), Group(runner, 10_000)
        gc.collect()
        gc.freeze()  # what this process holds besides is not walked through while a side is timed
        results = some.one_round(), some.by_queues()
        by_messages = paired(some.one_round, some.by_messages, rounds=rounds)
        return [
            paired(some.one_round, some.by_queues, rounds=rounds).row("local 1000"),
            by_messages.row("local 1000, over messages"),
            Row(
                case="local 1000, results",
                ours=results[0],
                baseline=results[1],
                unit="results",
                ratio=results[1] / results[0],
            ),
            paired(many.one_round, some.one_round, rounds=2 * rounds).row("local 10000"),
        ]


def json_rows(*, small: bool = False) -> list[Row]:
    """A state of 1M floats to JSON and back, beside a list of numbers."""
    return [_json_row(dtype, rounds=3 if small else 7) for dtype in ("float32", "float64")]


def _json_row(dtype: str, *, rounds: int) -> Row:
    state = AgentState(
        agent_id="a", weights=np.random.default_rng(0).normal(size=FLOATS).astype(dtype)
    )

    def ours() -> bytes:
        return AgentState.from_json(state.to_json()).weights.tobytes()

    def lists() -> bytes:
        document = json.dumps({"agent_id": "a", "weights": state.weights.tolist()})
        return np.array(json.loads(document)["weights"], dtype).tobytes()

    if not ours() == lists() == state.weights.tobytes():
        raise SystemExit("a state did not come back with every bit")
    return paired(ours, lists, rounds=rounds, warmups=0).row(f"json 1e6 {dtype}")


def replica_rows(*, small: bool = False) -> list[Row]:
    """The averager's part of a round."""
    with tempfile.TemporaryDirectory() as folder:
        return [round_row(Path(folder), repeats=3 if small else 9)]


CASES: dict[str, Callable[..., list[Row]]] = {
    "local 10000": local_rows,
    "json 1e6": json_rows,
    "mpi 2 1e6": partial(mpi_rows, 2, "1e6"),
    "mpi 2 1e7": partial(mpi_rows, 2, "1e7"),
    "mpi 4 1e7": partial(mpi_rows, 4, "1e7"),
    "spark 1000": spark_rows,
    "round of 3 replicas, 1 MB": replica_rows,
}
LARGE = ("mpi 2 1e7", "mpi 4 1e7")  # not in the small form


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--case", nargs="+", choices=CASES, metavar="NAME", help=", ".join(CASES))
    args = parser.parse_args()
    cases = args.case or [name for name in CASES if not (args.small and name in LARGE)]
    rows = [row for name in cases for row in CASES[name](small=args.small)]
    report("averaging", rows, args.json)


if __name__ == "__main__":
    main()
