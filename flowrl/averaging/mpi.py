"""Rounds of averaging over MPI: agents are dealt to ranks, and ranks add up what theirs offer.

Start all by `mpirun -n 4 python -m mpi4py train.py`. MPI waits for the slowest rank without a
timeout; a rank that dies ends all ranks (MPICH). Only buffers travel, nothing is pickled.
Sums are in f32 (f64 with an f64 array), so a mean is within 1e-6 of the greatest number of it.

A rank sends up to 8 bytes of each number round a ring, in 2 (ranks - 1) messages.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.averaging.coordinator import Averaged, Combined, LocalSyncCoordinator, _Meeting
from flowrl.averaging.rules import OuterStep
from flowrl.averaging.state import Tree, map_leaves
from flowrl.averaging.trainer import DistributedTrainer, LossFunction
from flowrl.errors import ConfigError, FlowrlError, TrainingError, format_error

_ABSENT, _NOT_FINITE = -1.0, -2.0  # instead of an agent's weight


class MPISyncCoordinator(LocalSyncCoordinator):
    """Brings the agents of all ranks together in rounds and barriers; all ranks make it alike.

    `own` are this rank's agents, every n-th of n ranks; messages reach them alone. Ranks refuse,
    by ConfigError, other files of flowrl, agents, outer step or `config` than the first one's.
    """

    _least_dtype = np.float32

    def __init__(
        self,
        agent_ids: Sequence[str],
        *,
        outer: OuterStep | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(outer=outer)
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:  # the latter if it finds no library
            raise ConfigError("MPI is missing: pip install '.[mpi]' in flowrl's folder") from error
        self._comm = MPI.COMM_WORLD
        self.rank, self._size = self._comm.Get_rank(), self._comm.Get_size()
        # without mpi4py.run, an error of one rank would let the others wait for ever
        if self._size == 1 or "mpi4py.run" not in sys.modules:
            missing = "2 ranks or more" if self._size == 1 else "`-m mpi4py` before the program"
            raise ConfigError(f"MPI needs {missing}: mpirun -n 2 python -m mpi4py PROGRAM")
        files = [path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))]
        self.check_alike("version of flowrl", files)
        self.check_alike("list of agents", [*agent_ids])
        self.check_alike("outer step or config", (outer, config))
        self._all, ids = tuple(agent_ids), len(set(agent_ids))
        if ids < max(len(self._all), self._size):
            agents = f"{len(self._all)} agents with {ids} ids for {self._size} ranks"
            raise ConfigError(f"{agents}; give each agent its own id and each rank an agent")
        self.own = self._all[self.rank :: self._size]
        self.rounds = 0  # that were begun

    def check_alike(self, name: str, part: object) -> None:
        """Raise ConfigError, on all ranks, unless it has the same `repr` on all; all call it."""
        digest = hashlib.sha256(repr(part).encode()).digest()
        digests = self._gathered(np.frombuffer(digest, np.uint8))
        others = np.flatnonzero((digests != digests[0]).any(axis=1))
        if others.size:
            raise ConfigError(f"rank {others[0]} has another {name} than rank 0; start all alike")

    async def attend(self, until: int, like: Tree) -> None:
        """Take part in the rounds that are left of so many, with no agent of this rank."""
        self.join("")
        while self.rounds < until:
            number = self._newest.round + 1 if self._newest else 0
            with suppress(TrainingError):  # on all ranks
                await self.mean("", number, like)
        self.leave("")

    def by_agent(self, own: Mapping[str, float]) -> dict[str, float]:
        """A number from 0 of each agent of all ranks, from this rank's; below 0 is none."""
        numbers = np.full(-(-len(self._all) // self._size), _ABSENT)
        numbers[: len(self.own)] = [own.get(agent, _ABSENT) for agent in self.own]
        return dict(zip(self._all, self._gathered(numbers).T.ravel().tolist(), strict=False))

    async def barrier(self, agent_id: str, timeout: float = 1.0) -> bool:
        """Wait for this rank's agents for so many seconds, then for all ranks as it takes."""
        if not await super().barrier(agent_id, timeout):
            return False
        if agent_id == min(self._queues):
            self._comm.Barrier()
        return await super().barrier(agent_id, timeout)

    def _averaged(self, meeting: _Meeting) -> Averaged:
        """Return a round's mean; an error of this rank alone ends all ranks, since they wait."""
        try:
            return super()._averaged(meeting)
        except FlowrlError:  # of all ranks
            raise
        except BaseException as error:  # no agent's, so it must not be left out instead
            raise SystemExit(f"rank {self.rank}: {format_error(error)}") from error

    def _combine(self, meeting: _Meeting) -> Combined:
        """The mean over all ranks; each of them calls it once in a round."""
        self.rounds += 1
        if self._newest is None:
            form = map_leaves(lambda leaf: (leaf.dtype.str, leaf.shape), meeting.like)
            self.check_alike("round or form of weights", (meeting.number, form))
        offers = meeting.offers  # rows are the coordinator's own copies
        given = {a: w if _is_finite(row) else _NOT_FINITE for a, (row, w) in offers.items()}
        weights = self.by_agent(given)
        members = tuple(sorted(agent for agent, weight in weights.items() if weight >= 0))
        total = math.fsum(weights[agent] for agent in members)
        if not total > 0:
            raise TrainingError("no weights are finite and count; lower learning_rate")
        own = [agent for agent in members if agent in offers]
        rows = [np.multiply(offers[a][0], weights[a] / total, out=offers[a][0]) for a in own]
        rows = rows or [np.zeros_like(next(iter(offers.values()))[0])]
        left_out = {a: "its weights are not finite" for a in weights if weights[a] == _NOT_FINITE}
        return _ring(self._comm, sum(rows[1:], start=rows[0])), members, left_out

    def _gathered(self, own: np.ndarray) -> np.ndarray:
        """`[ranks, n]`: an array `[n]` of each rank."""
        table = np.empty((self._size, own.size), own.dtype)
        self._comm.Allgather(own, table)
        return table


class MPIDistributedTrainer(DistributedTrainer):
    """Trains this rank's part of the agents; all ranks make it and call `train` alike.

    An agent that raises is left out and named on all ranks; `min_agents` counts those of all.
    """

    def __init__(
        self, agent_ids: Sequence[str], coordinator: MPISyncCoordinator | None = None, **kept: int
    ) -> None:
        self._ranks = coordinator or MPISyncCoordinator(agent_ids)
        super().__init__(agent_ids, self._ranks, **kept)
        self._agents = {agent: self.get_agent(agent) for agent in self._ranks.own}

    async def _train(
        self, loss_fn: LossFunction, iterations: int, learning_rate: float, sync_interval: int
    ) -> None:
        numbers = (iterations, learning_rate, sync_interval)
        self._ranks.check_alike("number for train", numbers)
        until = self._ranks.rounds + iterations // sync_interval
        await super()._train(loss_fn, *numbers)
        await self._ranks.attend(until, self.get_all_agents()[0].get_state().weights)
        raised = self._ranks.by_agent(dict.fromkeys(self.left_out, 0.0))
        at = {agent for agent, flag in raised.items() if flag == 0}
        self.left_out = dict.fromkeys(sorted(at), "it raised on another rank") | self.left_out


def _is_finite(row: np.ndarray) -> bool:
    return bool(np.isfinite(np.vdot(row, row)) or np.isfinite(row).all())  # squares may overflow


def _ring(comm: Any, row: np.ndarray) -> np.ndarray:
    """The sum of all ranks' rows `[d]`, the same bits on each; overwrites `row`.

    Pieces are added on their way round, then copied round (Patarasuk and Yuan 2009).
    """
    rank, size = comm.Get_rank(), comm.Get_size()
    pieces = np.array_split(row, size)
    came = np.empty_like(pieces[0])
    for step in range(2 * (size - 1)):
        given, taken = pieces[(rank - step) % size], pieces[(rank - step - 1) % size]
        into = came[: taken.size] if step < size - 1 else taken
        comm.Sendrecv(given, (rank + 1) % size, recvbuf=into, source=(rank - 1) % size)
        if into is not taken:
            taken += into
    return row
