"""The success of merged experts at a plan: the report, and the order for the process that finds it.

A leaf: playing runs skill code and loads JAX, so a confined process of its own does it.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from flowrl.config import Positive, Sandbox
from flowrl.experts.store import ExpertStore
from flowrl.launchers.confined import confined_run
from flowrl.paths import GraphPaths, existing_graph
from flowrl.runs import read_run
from flowrl.storage import records

EPISODES = 256
SEED = 1_000_003  # of worlds that no training has seen


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


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The order to let merged experts play a skill's plan in fresh worlds."""

    graph_path: Path
    skill: str
    episodes: Positive = EPISODES
    seed: int = SEED

    def report(self, *, sandbox: Sandbox) -> EvaluationReport:
        """Let a confined process play.

        Raises:
          FileRefusedError: the folder is no graph.
          ExpertMissingError: no such skill is merged; says which are.
          ConfinedError: the process's own reason why it could not play.
        """
        layout = existing_graph(self.graph_path.absolute())
        run = read_run(ExpertStore(layout).archive_of(self.skill))
        order = replace(self, graph_path=layout.root)
        printed = confined_run(order, layout, run, how=sandbox)
        return records.from_json(EvaluationReport, json.loads(printed))

    def work(self) -> int:
        """Play in this process and print the report as JSON."""
        from flowrl.evaluation import evaluate

        paths = GraphPaths(self.graph_path)
        report = evaluate(paths, self.skill, episodes=self.episodes, seed=self.seed)
        sys.stdout.write(json.dumps(asdict(report)))
        return 0
