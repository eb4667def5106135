"""`flowrl evaluate`, its flags and output: a leaf, because the work loads jax."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass

from flowrl.arguments import GraphArgument, SkillArgument
from flowrl.config import Count
from flowrl.paths import DEFAULT_GRAPH, GraphPaths


@dataclass(frozen=True, kw_only=True)
class EvaluateCommand:
    """Play a skill's plan in fresh worlds, and count successes.

    Examples:
      flowrl evaluate exp/demo "Collect Wood" --episodes 256
      flowrl evaluate exp/demo "Place Table" --json
    """

    graph_path: GraphArgument = DEFAULT_GRAPH
    """Folder of the graph."""
    skill: SkillArgument
    """The skill's name, or its expert number."""
    episodes: Count = 256
    """Episodes to play, each in a world of its own."""
    seed: Count = 1_000_003
    """Seed of the worlds and actions."""
    at_least: float = 0.0
    """Exit with 1 when less than this share of the episodes completes the plan."""
    json: bool = False
    """Print JSON instead of lines."""

    def __call__(self) -> int:
        """Evaluate and print."""
        from flowrl.evaluate import evaluate

        paths = GraphPaths(self.graph_path)
        found = evaluate(paths, self.skill, episodes=self.episodes, seed=self.seed)
        if self.json:
            sys.stdout.write(json.dumps(asdict(found), indent=2) + "\n")
        else:
            sys.stdout.write(
                f"{found.skill}: {found.episodes} episodes of the experts of generation "
                f"{found.generation}, {found.mean_episode_length:.0f} steps each\n"
            )
            for one in found.steps:
                interval = f"95 % interval {one.low:.1%} to {one.high:.1%}"
                rate = f"{one.success_rate:.1%} succeed ({interval})"
                sys.stdout.write(f"{one.count} x {one.skill}, expert {one.expert}: {rate}\n")
        return 0 if found.success_rate >= self.at_least else 1
