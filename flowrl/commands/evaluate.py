"""`flowrl evaluate`, its flags and output: a leaf, because the work loads jax.

Playing runs skill code, so a confined process of its own does it.
"""

from __future__ import annotations

import subprocess
from dataclasses import asdict, dataclass, replace

from flowrl import console
from flowrl.arguments import ReportCommand, SkillArgument
from flowrl.config import Positive, Sandbox
from flowrl.experts.store import ExpertStore
from flowrl.launchers.confined import confined_run
from flowrl.paths import GraphPaths, existing_graph
from flowrl.runs import read_run


@dataclass(frozen=True, kw_only=True)
class EvaluateCommand(ReportCommand):
    """Play a skill's plan in fresh worlds, and count successes.

    Examples:
      flowrl evaluate exp/demo "Collect Wood" --episodes 256
      flowrl evaluate exp/demo "Place Table" --json
    """

    skill: SkillArgument
    """The skill's name, or its expert number."""
    episodes: Positive = 256
    """Episodes to play, each in a world of its own."""
    seed: int = 1_000_003
    """Seed of the worlds and actions."""
    at_least: float = 0.0
    """Exit with 1 when less than this share of the episodes completes the plan."""
    sandbox: Sandbox = "auto"
    """Confine the evaluation by bubblewrap, with the graph read-only; auto: if it is there."""

    def __call__(self) -> int:
        """Evaluate in a child process, which prints; returns its exit code.

        Raises:
          ExpertMissingError: no such skill is merged; says which are.
        """
        code = self.played().returncode
        return code if code >= 0 else 128 - code

    def played(self, *, stdout: int | None = None) -> subprocess.CompletedProcess[bytes]:
        """Let a confined process play and print; raises as the command."""
        layout = existing_graph(self.graph_path.absolute())
        run = read_run(ExpertStore(layout).archive_of(self.skill))
        order = replace(self, graph_path=layout.root)
        return confined_run(order, layout, run, how=self.sandbox, stdout=stdout)

    def work(self) -> int:
        """Evaluate and print in this process."""
        from flowrl.evaluation import evaluate

        paths = GraphPaths(self.graph_path)
        found = evaluate(paths, self.skill, episodes=self.episodes, seed=self.seed)
        lines = [
            f"{found.skill}: {found.episodes} episodes of the experts of generation "
            f"{found.generation}, {found.mean_episode_length:.0f} steps each"
        ]
        for one in found.steps:
            interval = f"95 % interval {one.low:.1%} to {one.high:.1%}"
            rate = f"{one.success_rate:.1%} succeed ({interval})"
            lines.append(f"{one.count} x {one.skill}, expert {one.expert}: {rate}")
        if found.clipped_rewards:
            lines.append(f"{found.clipped_rewards:,} rewards were clipped to ±10,000")
        console.print_report(asdict(found), lines, as_json=self.json)
        return 0 if found.success_rate >= self.at_least else 1
