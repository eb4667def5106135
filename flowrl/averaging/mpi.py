"""Rounds of averaging over MPI: agents are dealt to ranks, and ranks add up what theirs offer.

Start all by `mpirun -n 4 python -m mpi4py train.py`. MPI waits for the slowest rank without a
timeout; a rank that dies or raises ends all ranks (MPICH). Only buffers travel, nothing is pickled.
Sums are in f32 (f64 with an f64 array), so a mean is within 1e-6 of the greatest number of it.

A rank sends up to 8 bytes of each number by `ring`, in 2 (ranks - 1) messages one after another,
and as many by `allreduce`, for many ranks with few numbers; `f16`, `int8` and `top_k` (the 1 % that
changed most) send 2, 1 or 0.08 to each other rank, which is slower within one machine. These three
send the change since the round before, but the first time, and add what is lost to the next change
(error feedback, arXiv:1906.02367): agents must go on from the round's tree.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.averaging.coordinator import Combined, LocalSyncCoordinator, _Meeting
from flowrl.averaging.rules import OuterStep, Rule
from flowrl.averaging.state import map_leaves
from flowrl.averaging.trainer import DistributedTrainer, LossFunction
from flowrl.errors import ConfigError, TrainingError

_ABSENT, _NOT_FINITE = -1.0, -2.0  # instead of an agent's weight


class MPISyncCoordinator(LocalSyncCoordinator):
    """Brings the agents of all ranks together in rounds and barriers; all ranks make it alike.

    `own` are this rank's agents, every n-th of n ranks; messages reach them alone. Ranks refuse,
    by ConfigError, other files of flowrl, agents, ways or `config` than the first one's.
    """

    _least_dtype = np.float32

    def __init__(
        self,
        agent_ids: Sequence[str],
        *,
        way: str = "ring",
        rule: Rule | None = None,
        outer: OuterStep | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        if (rule or Rule()).name != "mean":
            raise ConfigError("MPI takes the mean; use LocalSyncCoordinator or flowrl average")
        if way not in ("ring", "allreduce", *_CODECS):
            raise ConfigError(f"way {way!r} is unknown; use ring, allreduce, {', '.join(_CODECS)}")
        super().__init__(outer=outer)
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:  # the latter if it finds no library
            raise ConfigError("MPI is missing: pip install 'flowrl[mpi]'") from error
        self._comm, self._in_place = MPI.COMM_WORLD, MPI.IN_PLACE
        self.rank, self._size = self._comm.Get_rank(), self._comm.Get_size()
        # without mpi4py.run, an error of one rank would let the others wait for ever
        if self._size == 1 or "mpi4py.run" not in sys.modules:
            raise ConfigError("MPI needs 2 ranks or more: mpirun -n 2 python -m mpi4py PROGRAM")
        files = [path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))]
        self.check_alike({"version of flowrl": files, "list of agents": [*agent_ids]})
        self.check_alike({"way or config": (way, outer, config)})
        self._all, self._way, ids = tuple(agent_ids), way, len(set(agent_ids))
        if ids < max(len(self._all), self._size):
            agents = f"{len(self._all)} agents with {ids} ids for {self._size} ranks"
            raise ConfigError(f"{agents}; give each agent its own id and each rank an agent")
        self.own = self._all[self.rank :: self._size]
        self._lost: Any = 0  # by encoding, in the rounds before

    def check_alike(self, parts: Mapping[str, object]) -> None:
        """Raise ConfigError, on all ranks, unless their parts have the same `repr`; all call it."""
        for name, part in parts.items():
            self._gathered(np.empty(0), name, part)

    async def barrier(self, agent_id: str, timeout: float = 1.0) -> bool:
        """Wait for this rank's agents for so many seconds, then for all ranks as it takes."""
        if not await super().barrier(agent_id, timeout):
            return False
        if agent_id == min(self._queues):
            self._comm.Barrier()
        return await super().barrier(agent_id, timeout)

    def _combine(self, meeting: _Meeting) -> Combined:
        """The mean over all ranks; each of them calls it once in a round."""
        weights = self._weights(meeting)
        members = tuple(sorted(agent for agent, weight in weights.items() if weight >= 0))
        total = math.fsum(weights[agent] for agent in members)
        if not total > 0:
            raise TrainingError("no weights are finite and count; lower learning_rate")
        offers = meeting.offers  # rows are the coordinator's own copies
        own = [agent for agent in members if agent in offers]
        rows = [np.multiply(offers[a][0], weights[a] / total, out=offers[a][0]) for a in own]
        rows = rows or [np.zeros_like(next(iter(offers.values()))[0])]
        share = math.fsum(weights[agent] for agent in own) / total
        why = "its weights are not finite"
        left_out = {a: why for a in sorted(weights) if weights[a] == _NOT_FINITE}
        return self._added(sum(rows[1:], start=rows[0]), share), members, left_out

    def _weights(self, meeting: _Meeting) -> dict[str, float]:
        """The weight of each agent of all ranks, or why it does not count."""
        own = np.full(-(-len(self._all) // self._size), _ABSENT)
        for place, agent in enumerate(self.own):
            if agent in meeting.offers:
                row, weight = meeting.offers[agent]
                finite = np.isfinite(np.vdot(row, row)) or np.isfinite(row).all()
                own[place] = weight if finite else _NOT_FINITE
        form = self._newest is None and map_leaves(lambda x: (x.dtype.str, x.shape), meeting.like)
        table = self._gathered(own, "round or form of weights", (meeting.number, form))
        return dict(zip(self._all, table.T.ravel().tolist(), strict=False))

    def _added(self, row: np.ndarray, share: float) -> np.ndarray:
        """The sum of all ranks' rows `[d]`, the same bits on each; overwrites `row`."""
        if self._way == "allreduce":
            self._comm.Allreduce(self._in_place, row)
            return row
        if self._way == "ring" or self._before is None:
            return _ring(self._comm, row)
        encode, decode = _CODECS[self._way]
        change = row - row.dtype.type(share) * self._before[0] + self._lost
        sent = encode(change.astype(np.float32))
        self._lost = change - decode(sent, row.size)
        return sum((decode(each, row.size) for each in self._gathered(sent)), self._before[0])

    def _gathered(self, own: np.ndarray, name: str = "", part: object = None) -> np.ndarray:
        """`[ranks, n]`: an array `[n]` of each rank; raises if a `part` has another `repr`."""
        digest = np.frombuffer(hashlib.sha256(repr(part).encode()).digest(), np.uint8)
        sent = np.concatenate([digest, own.view(np.uint8)])
        table = np.empty((self._size, sent.size), np.uint8)
        self._comm.Allgather(sent, table)
        others = np.flatnonzero((table[:, :32] != table[0, :32]).any(axis=1))
        if others.size:
            raise ConfigError(f"rank {others[0]} has another {name} than rank 0; start all alike")
        return table[:, 32:].view(own.dtype)


class MPIDistributedTrainer(DistributedTrainer):
    """Trains this rank's part of the agents; all ranks make it and call `train` alike.

    An agent that raises is left out while its rank has `min_agents` others; else all ranks end.
    """

    def __init__(
        self, agent_ids: Sequence[str], coordinator: MPISyncCoordinator | None = None, **kept: int
    ) -> None:
        self._ranks = coordinator or MPISyncCoordinator(agent_ids)
        super().__init__(self._ranks.own, self._ranks, **kept)

    def initialize_weights(self, weights: Any, noise: float = 0.0, *, seed: int = 0) -> None:
        """Give this rank's agents these weights, each with noise of its own."""
        super().initialize_weights(weights, noise, seed=seed + 2**32 * self._ranks.rank)

    async def train(self, loss_fn: LossFunction, *numbers: Any, **named: Any) -> dict[str, Any]:
        """Train as `DistributedTrainer.train`, after a check that all ranks do the same."""
        self._ranks.check_alike({"number for train": (numbers, sorted(named.items()))})
        return await super().train(loss_fn, *numbers, **named)


def _ring(comm: Any, row: np.ndarray) -> np.ndarray:
    """Add pieces on their way round, then copy them round (Patarasuk and Yuan 2009)."""
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


def _encode_int8(row: np.ndarray) -> np.ndarray:
    scale = np.maximum(abs(row).max(keepdims=True) / 127, np.finfo(np.float32).tiny)
    numbers = np.rint(row / scale).astype(np.int8)
    return np.concatenate([scale.view(np.uint8), numbers.view(np.uint8)])


def _encode_top_k(row: np.ndarray) -> np.ndarray:
    count = math.ceil(row.size / 100)
    places = np.argpartition(abs(row), -count)[-count:].astype(np.uint32)
    return np.concatenate([places, row[places].view(np.uint32)]).view(np.uint8)


def _decode_top_k(sent: np.ndarray, size: int) -> np.ndarray:
    places, numbers = np.split(sent.view(np.uint32), 2)
    row = np.zeros(size, np.float32)
    row[places] = numbers.view(np.float32)
    return row


# f32 `[d]` → bytes; these and d → f32 `[d]`
_CODECS: dict[str, tuple[Any, Any]] = {
    "f16": (
        lambda row: np.clip(row, -65504, 65504).astype(np.float16).view(np.uint8),
        lambda sent, _: sent.view(np.float16).astype(np.float32),
    ),
    "int8": (_encode_int8, lambda sent, _: sent[4:].view(np.int8) * sent[:4].view(np.float32)),
    "top_k": (_encode_top_k, _decode_top_k),
}
