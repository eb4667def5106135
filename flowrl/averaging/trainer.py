"""Agents that learn side by side and average their weights every so often."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.averaging.coordinator import Averaged, LocalSyncCoordinator, SyncCoordinator
from flowrl.averaging.state import AgentState, Tree, map_leaves
from flowrl.errors import ConfigError, FileRefusedError, TrainingError, closest, format_error
from flowrl.storage import records

LossFunction = Callable[[Any], tuple[float, Tree]]  # weights → loss, gradients
SyncFunction = Callable[[Tree, Averaged], Tree]  # own weights, the round → new weights
_FILE_LIMIT_BYTES = 2**33


class DistributedAgent:
    """An agent that learns by gradient descent; `history` has its newest losses.

    It waits for others through the coordinator, once it has joined that.
    """

    def __init__(
        self, agent_id: str, coordinator: SyncCoordinator, *, history_bound: int = 1000
    ) -> None:
        self.agent_id, self.coordinator = agent_id, coordinator
        self.history: deque[float] = deque(maxlen=history_bound)
        self.round = 0  # the next one
        self.rounds_missed = 0  # that left it out
        self._state: AgentState | None = None

    def get_state(self) -> AgentState:
        """Return the agent's state; ConfigError before it has weights."""
        if self._state is None:
            raise ConfigError(f"agent {self.agent_id} has no weights; set them first")
        return self._state

    def set_weights(self, weights: Tree) -> None:
        """Go on from a copy of weights; ConfigError if they are no tree of arrays."""
        known = self._state or AgentState(agent_id=self.agent_id, weights=weights)
        self._state = replace(known, weights=map_leaves(np.array, weights))

    async def train_step(self, loss_fn: LossFunction, learning_rate: float = 0.01) -> float:
        """Make one step down the gradient and let others run; returns the loss before it.

        Raises ConfigError if the gradients have other keys or shapes than the weights.
        """
        state = self.get_state()
        loss, gradients = loss_fn(state.weights)

        def step(weight: np.ndarray, gradient: np.ndarray) -> np.ndarray:
            return np.asarray(weight - learning_rate * gradient, weight.dtype)

        self._state = replace(
            state,
            weights=map_leaves(step, state.weights, gradients),
            gradients=gradients,
            loss=float(loss),
            iteration=state.iteration + 1,
        )
        self.history.append(float(loss))
        await asyncio.sleep(0)
        return float(loss)

    async def synchronize(
        self, sync_fn: SyncFunction | None = None, *, weight: float = 1.0
    ) -> Averaged:
        """Offer the weights for the next round and take its tree, or what `sync_fn` makes of it."""
        weights = self.get_state().weights
        averaged = await self.coordinator.mean(self.agent_id, self.round, weights, weight)
        self.set_weights(sync_fn(weights, averaged) if sync_fn else averaged.tree)
        self.round = averaged.round + 1
        self.rounds_missed += self.agent_id not in averaged.members
        return averaged

    async def barrier_sync(self, timeout: float = 1.0) -> bool:
        """Wait until all agents wait here; returns whether they did within so many seconds."""
        return await self.coordinator.barrier(self.agent_id, timeout)


class DistributedTrainer:
    """Trains agents side by side; one that raises is left out and named.

    The agents are named by `agent_ids`, or agent0 and so on by `num_agents`. The coordinator is a
    LocalSyncCoordinator unless told otherwise. Training with fewer than `min_agents` is an error.
    """

    def __init__(
        self,
        agent_ids: Sequence[str] | None = None,
        coordinator: SyncCoordinator | None = None,
        *,
        num_agents: int = 0,
        min_agents: int = 1,
    ) -> None:
        ids = agent_ids or [f"agent{number}" for number in range(num_agents)]
        if len(set(ids)) < len(ids) or (agent_ids and num_agents):
            raise ConfigError("agents have one id; name each once in agent_ids, or say num_agents")
        if not 1 <= min_agents <= len(ids):
            raise ConfigError(f"min_agents is {min_agents} of {len(ids)} agents; choose 1 to all")
        self.coordinator = coordinator or LocalSyncCoordinator()
        self.min_agents = min_agents
        self.left_out: dict[str, str] = {}  # agents that raised, and what
        self._agents = {each: DistributedAgent(each, self.coordinator) for each in ids}
        self._ids, self._seconds = [*ids], 0.0

    def get_agent(self, agent_id: str) -> DistributedAgent:
        """One agent; ConfigError if there is none of this id."""
        if agent_id not in self._agents:
            raise ConfigError(f"there is no agent {agent_id}{closest(agent_id, self._agents)}")
        return self._agents[agent_id]

    def get_all_agents(self) -> list[DistributedAgent]:
        """All agents, those that are left out as well."""
        return [*self._agents.values()]

    def initialize_weights(self, weights: Tree, noise: float = 0.0, *, seed: int = 0) -> None:
        """Give all agents these weights, each with normal noise of its own of this scale."""
        for name, agent in self._agents.items():
            random = np.random.default_rng([seed, *name.encode()])
            noisy = partial(_noisy, scale=noise, random=random)
            agent.set_weights(map_leaves(noisy, weights) if noise else weights)

    async def train(
        self,
        loss_fn: LossFunction,
        iterations: int = 100,
        learning_rate: float = 0.01,
        sync_interval: int = 10,
    ) -> dict[str, Any]:
        """Train all agents for so many steps, a round after each `sync_interval`; the summary.

        Raises ConfigError for a number that is not above 0, or an agent that has no weights or
        joined already; TrainingError if fewer than `min_agents` are left.
        """
        if not min(learning_rate, iterations, sync_interval) > 0:
            raise ConfigError("iterations, learning_rate and sync_interval must be above 0")
        self._check_left()
        began = time.perf_counter()
        await self._train(loss_fn, iterations, learning_rate, sync_interval)
        self._seconds += time.perf_counter() - began
        self._check_left()
        return self.get_summary()

    async def _train(
        self, loss_fn: LossFunction, iterations: int, learning_rate: float, sync_interval: int
    ) -> None:
        """Train the agents that are left, and add to `left_out` those that raise."""
        agents = [each for each in self.get_all_agents() if each.agent_id not in self.left_out]
        running = self._left()

        async def train_one(agent: DistributedAgent) -> None:
            nonlocal running
            step = 0
            try:
                while step < iterations and running >= self.min_agents:
                    await agent.train_step(loss_fn, learning_rate)
                    if (step + 1) % sync_interval == 0:
                        await agent.synchronize()
                    step += 1
            finally:  # the others wait for it no more
                running -= step < iterations
                self.coordinator.leave(agent.agent_id)

        with ExitStack() as joined:
            for agent in agents:
                agent.get_state()
                self.coordinator.join(agent.agent_id)
                joined.callback(self.coordinator.leave, agent.agent_id)
            ends = await asyncio.gather(*map(train_one, agents), return_exceptions=True)
        raised = {a.agent_id: end for a, end in zip(agents, ends, strict=True) if end is not None}
        self.left_out |= {name: format_error(error) for name, error in raised.items()}

    def _left(self) -> int:
        return len(self._ids) - len(self.left_out)

    def _check_left(self) -> None:
        if self._left() < self.min_agents:
            why = f"{list(self.left_out.items())[:5]}"
            raise TrainingError(f"fewer than {self.min_agents} agents are left, without {why}")

    def get_summary(self) -> dict[str, Any]:
        """Numbers of agents, seconds, newest losses, rounds that left one out, and who raised."""
        left = [each for each in self.get_all_agents() if each.agent_id not in self.left_out]
        losses = {each.agent_id: each.history[-1] for each in left if each.history}
        return {
            "total_agents": len(self._ids),
            "active_agents": self._left(),
            "total_time": self._seconds,
            "final_losses": losses,
            "mean_loss": sum(losses.values()) / len(losses) if losses else None,
            "rounds_missed": {a.agent_id: a.rounds_missed for a in left if a.rounds_missed},
            "left_out": dict(self.left_out),
        }

    def save(self, path: str | Path) -> None:
        """Write all agents' states; histories and an outer step's momentum are not in them."""
        states = [each.get_state().to_dict() for each in self.get_all_agents()]
        kept = {"min_agents": self.min_agents, "left_out": self.left_out}
        records.write(Path(path), {**kept, "ids": self._ids, "agents": states})

    @classmethod
    def load(cls, path: str | Path, coordinator: Any = None, **settings: Any) -> DistributedTrainer:
        """The trainer that `save` wrote; FileRefusedError if its file is missing or damaged."""
        kept = records.read_document(Path(path), limit_bytes=_FILE_LIMIT_BYTES)
        try:
            states = [AgentState.from_dict(each) for each in kept["agents"]]
            settings = {"min_agents": kept["min_agents"], **settings}
            trainer = cls(kept["ids"], coordinator, **settings)
            trainer.left_out.update(kept["left_out"])
            agents = [trainer.get_agent(state.agent_id) for state in states]
        except (ConfigError, KeyError, TypeError) as error:
            raise FileRefusedError(f"{path} is malformed: {error}; {records.RESTORE}") from error
        for agent, state in zip(agents, states, strict=True):
            agent._state = state
        return trainer


def simple_loss_function(weights: np.ndarray) -> tuple[float, np.ndarray]:
    """The sum of squares of weights `[d]` and its gradient; 0 at 0."""
    return float(np.sum(weights**2)), 2 * weights


def ackley(weights: np.ndarray) -> tuple[float, np.ndarray]:
    """Ackley's function of weights `[d]` and its gradient; 0 at 0, with many local minima."""
    size, radius = weights.size, np.sqrt(np.mean(weights**2))
    bowl = 20 * np.exp(-0.2 * radius)
    waves = np.exp(np.mean(np.cos(2 * np.pi * weights)))
    slope = 0.2 * bowl * weights / (size * radius) if radius else np.zeros_like(weights)
    ripple = 2 * np.pi / size * waves * np.sin(2 * np.pi * weights)
    return float(20 + np.e - bowl - waves), slope + ripple


def _noisy(leaf: np.ndarray, scale: float, random: np.random.Generator) -> np.ndarray:
    return leaf + (scale * random.normal(size=leaf.shape)).astype(leaf.dtype)
