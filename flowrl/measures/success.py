"""The success of merged experts at a plan; a leaf, since what plays loads JAX and others read."""

from __future__ import annotations

from dataclasses import dataclass

from flowrl.runs import StepEnds


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRate:
    """The success rate of a step of the plan, with its 95 % Wilson interval."""

    skill: str
    count: int
    expert: int
    successes: int
    success_rate: float
    low: float
    high: float
    ends: StepEnds


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationReport:
    """The success of the merged experts at a plan."""

    graph: str
    generation: int
    skill: str
    episodes: int
    mean_episode_length: float
    mean_episode_return: float
    deaths: float  # share of the episodes that ended by neither success nor a time limit
    clipped_rewards: int
    steps: tuple[StepRate, ...]

    @property
    def success_rate(self) -> float:
        """The share of episodes that completed the whole plan."""
        return self.steps[-1].success_rate
