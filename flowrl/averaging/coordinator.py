"""Coordinators of agents: messages, barriers, and rounds of averaging.

A *round* takes what each agent offers and makes one tree of it; all its members get the same bits.
The agents of a coordinator are those that joined and did not leave.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from flowrl.averaging.rules import OuterStep, Rule, average
from flowrl.averaging.state import SyncMessage, Tree, from_row, to_row
from flowrl.errors import ConfigError, FlowrlError, TrainingError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Averaged:
    """The result of a round: one read-only tree, its members, and why others were left out."""

    round: int
    tree: Tree = field(repr=False)  # asyncio.run makes a repr of a result
    members: tuple[str, ...]
    left_out: Mapping[str, str]


class SyncCoordinator(Protocol):
    """A way to bring agents together; timeouts are in seconds."""

    def join(self, agent_id: str) -> None:
        """Count an agent in; ConfigError if another one has its id."""

    def leave(self, agent_id: str) -> None:
        """Wait for an agent no more; its messages are dropped."""

    async def broadcast(self, message: SyncMessage) -> dict[str, bool]:
        """Send to all but the source; returns for each agent whether it took the message."""
        ...

    async def send(self, message: SyncMessage) -> bool:
        """Send to the message's targets; returns whether all of them took it."""
        ...

    async def gather(self, agent_id: str, timeout: float = 1.0) -> list[SyncMessage]:
        """All messages for an agent, by round and source; waits for the first one."""
        ...

    async def barrier(self, agent_id: str, timeout: float = 1.0) -> bool:
        """Wait until all agents wait here; returns whether they did in time."""
        ...

    async def mean(self, agent_id: str, round: int, tree: Tree, weight: float = 1.0) -> Averaged:
        """Offer a tree for a round, and wait for what it makes of all agents' trees.

        Of a round that is over, the newest one is returned. Raises ConfigError for a tree of
        another form, a bad weight or round, or a rule that cannot be used; TrainingError if no
        agent's tree is finite.
        """
        ...


Weighted = tuple[np.ndarray, float]  # a row `[d]` and its weight
Combined = tuple[np.ndarray, tuple[str, ...], dict[str, str]]


def stale_weight(weight: float, staleness: int, *, exponent: float = 0.5, limit: int = 4) -> float:
    """The weight w (1 + s)^-a of an offer that is s rounds old (FedAsync, arXiv:1903.03934).

    >>> [stale_weight(8.0, age, exponent=1.0, limit=3) for age in (0, 1, 3, 4)]
    [8.0, 4.0, 2.0, 0.0]
    """
    return weight * (1 + staleness) ** -exponent if 0 <= staleness <= limit else 0.0


@dataclass(slots=True)
class _Meeting:
    """Agents that wait for each other: at a barrier, or in a round with what they offer."""

    number: int = 0
    like: Tree = field(default_factory=dict)
    offers: dict[str, Weighted] = field(default_factory=dict)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    result: Averaged | FlowrlError | None = None

    @property
    def is_open(self) -> bool:
        return bool(self.offers) and not self.over.is_set()

    async def wait(self, agent_id: str) -> None:
        """Wait for its end; an agent that is cancelled takes its offer back."""
        try:
            await self.over.wait()
        finally:
            if self.is_open:
                self.offers.pop(agent_id)


# ruff: noqa: D102 (the Protocol says what they do)
class LocalSyncCoordinator(SyncCoordinator):
    """Brings the agents of one event loop together, in memory; nothing is sent anywhere.

    `outer` is the step from the round before to what `rule` makes; the first round takes that. At
    most `queue_bound` messages wait for an agent. `latency_seconds` delay all, for tests.
    """

    _least_dtype: type = np.float64  # of rows

    def __init__(
        self,
        *,
        rule: Rule | None = None,
        outer: OuterStep | None = None,
        queue_bound: int = 1024,
        latency_seconds: float = 0.0,
    ) -> None:
        self._rule, self._outer = rule or Rule(), outer or OuterStep()
        self._queue_bound, self._latency_seconds = queue_bound, latency_seconds
        self._queues: dict[str, asyncio.Queue[SyncMessage]] = {}
        self._barrier, self._round = _Meeting(), _Meeting()
        self._newest: Averaged | None = None
        self._before: tuple[np.ndarray, np.ndarray] | None = None  # the newest row, its velocity

    def join(self, agent_id: str) -> None:
        if agent_id in self._queues:
            raise ConfigError(f"agent {agent_id} has joined already; give each agent its own id")
        self._queues[agent_id] = asyncio.Queue(self._queue_bound)

    def leave(self, agent_id: str) -> None:
        self._queues.pop(agent_id, None)
        self._end_complete()

    async def broadcast(self, message: SyncMessage) -> dict[str, bool]:
        await asyncio.sleep(self._latency_seconds)
        others = [agent for agent in self._queues if agent != message.source_id]
        return {agent: self._deliver(agent, message) for agent in others}

    async def send(self, message: SyncMessage) -> bool:
        await asyncio.sleep(self._latency_seconds)
        return all([self._deliver(agent, message) for agent in message.target_ids])

    async def gather(self, agent_id: str, timeout: float = 1.0) -> list[SyncMessage]:
        queue, taken = self._queue(agent_id), []
        with suppress(TimeoutError):
            taken.append(await asyncio.wait_for(queue.get(), timeout))
        while not queue.empty():
            taken.append(queue.get_nowait())
        return sorted(taken, key=lambda message: (message.round, message.source_id))

    async def barrier(self, agent_id: str, timeout: float = 1.0) -> bool:
        self._queue(agent_id)
        if not self._barrier.is_open:
            self._barrier = _Meeting()
        meeting = self._barrier
        meeting.offers[agent_id] = (np.empty(0), 0.0)
        self._end_complete()
        with suppress(TimeoutError):
            await asyncio.wait_for(meeting.wait(agent_id), timeout)
        return meeting.over.is_set()

    async def mean(self, agent_id: str, round: int, tree: Tree, weight: float = 1.0) -> Averaged:
        self._queue(agent_id)
        if not 0 <= weight < math.inf:
            raise ConfigError(f"agent {agent_id} has weight {weight:g}; weights are numbers from 0")
        if self._latency_seconds:
            await asyncio.sleep(self._latency_seconds)
        if self._newest is not None and round <= self._newest.round:
            return self._newest
        if not self._round.is_open:
            self._round = _Meeting(round, self._newest.tree if self._newest else tree)
        meeting = self._round
        if round != meeting.number:
            raise ConfigError(
                f"agent {agent_id} offers for round {round}, others for {meeting.number}; "
                "number the rounds of all alike"
            )
        meeting.offers[agent_id] = (to_row(tree, meeting.like, self._least_dtype), weight)
        self._end_complete()
        await meeting.wait(agent_id)
        if isinstance(meeting.result, FlowrlError):
            raise meeting.result
        if meeting.result is None:
            raise TrainingError(f"round {round} failed for another agent, which says why")
        return meeting.result

    def _end_complete(self) -> None:
        """End the barrier and the round for which all agents are there."""
        for meeting in (self._barrier, self._round):
            if meeting.is_open and self._queues.keys() <= meeting.offers.keys():
                try:
                    meeting.result = self._averaged(meeting) if meeting is self._round else None
                except FlowrlError as error:
                    meeting.result = error  # for every agent that waits
                finally:
                    meeting.over.set()

    def _averaged(self, meeting: _Meeting) -> Averaged:
        mean, members, left_out = self._combine(meeting)
        if left_out:
            facts = {"round": meeting.number, "left_out": left_out}
            logger.warning("agents were left out of a round", extra=facts)
        before, velocity = self._before or (mean, np.zeros_like(mean))
        self._before = self._outer.apply(before, mean, velocity)
        tree = from_row(self._before[0], meeting.like)
        self._newest = Averaged(meeting.number, tree, members, left_out)
        return self._newest

    def _combine(self, meeting: _Meeting) -> Combined:
        """The row f64 `[d]` of a round, its members, and why others are left out: NaN, infinity.

        Equal weights count as none. Raises TrainingError if no row is finite.
        """
        agents = np.array(sorted(meeting.offers), object)
        rows, weights = zip(*(meeting.offers[agent] for agent in agents), strict=True)
        rows, weights = np.stack(rows), np.array(weights)
        finite = np.isfinite(rows).all(axis=1)
        if not finite.any():
            names = ", ".join(agents)
            raise TrainingError(f"no weights are finite ({names:.80}); lower learning_rate")
        weights = weights[finite]
        equal = weights[0] > 0 and (weights == weights[0]).all()
        mean = average(self._rule, rows[finite], None if equal else weights)
        left_out = dict.fromkeys(agents[~finite], "its weights are not finite")
        return mean, (*agents[finite],), left_out

    def _queue(self, agent_id: str) -> asyncio.Queue[SyncMessage]:
        if agent_id not in self._queues:
            raise ConfigError(f"agent {agent_id} has not joined the coordinator; call join first")
        return self._queues[agent_id]

    def _deliver(self, agent_id: str, message: SyncMessage) -> bool:
        queue = self._queues.get(agent_id)
        if queue is None or queue.full():
            return False
        queue.put_nowait(message)
        return True
