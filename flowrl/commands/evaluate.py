"""`flowrl evaluate`, its flags and table: a leaf, because the work loads jax."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tyro
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from flowrl.config import Count
from flowrl.paths import GraphPaths

if TYPE_CHECKING:
    from flowrl.evaluate import EvaluationReport


@dataclass(frozen=True, kw_only=True)
class EvaluateCommand:
    """Walk a skill's plan with the merged experts in fresh worlds and count successes.

    Examples:
      flowrl evaluate exp/demo --skill "Collect Wood" --episodes 256
      flowrl evaluate exp/demo --skill "Place Table" --json
    """

    graph_path: tyro.conf.Positional[Path]
    """Folder of the graph."""
    skill: str
    """The skill's name."""
    episodes: Count = 256
    """Episodes to play, each in a world of its own."""
    seed: Count = 1_000_003
    """Seed of the worlds and actions."""
    at_least: float = 0.0
    """Exit with 1 when less than this share of the episodes completes the plan."""
    json: bool = False
    """Print JSON instead of a table."""

    def __call__(self) -> int:
        """Evaluate and print."""
        from flowrl.evaluate import evaluate

        paths = GraphPaths(self.graph_path)
        found = evaluate(paths, self.skill, episodes=self.episodes, seed=self.seed)
        if self.json:
            sys.stdout.write(json.dumps(asdict(found), indent=2) + "\n")
        else:
            Console().print(_table(found))
        return 0 if found.success_rate >= self.at_least else 1


def _table(found: EvaluationReport) -> Group:
    heading = Text(
        f"{found.skill}: {found.episodes} episodes of the experts of generation "
        f"{found.generation}, {found.mean_episode_length:.0f} steps each"
    )
    table = Table(box=None, pad_edge=False)
    table.add_column("step")
    for name in ("count", "expert", "success", "95 % interval"):
        table.add_column(name, justify="right")
    for rate in found.steps:
        table.add_row(
            Text(rate.skill),
            str(rate.count),
            str(rate.expert),
            f"{rate.success_rate:.1%}",
            f"{rate.low:.1%} to {rate.high:.1%}",
        )
    return Group(heading, table)
