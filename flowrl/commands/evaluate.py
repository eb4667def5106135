"""`flowrl evaluate`, its flags and output: a leaf."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from flowrl import console
from flowrl.api import EPISODES, SEED, evaluate
from flowrl.arguments import Count, ReportCommand, Seed, SkillArgument
from flowrl.config import Sandbox
from flowrl.measures.causes import EvaluationReport
from flowrl.paths import GraphPaths
from flowrl.runs import StepEnds
from flowrl.storage.records import Natural, Share


@dataclass(frozen=True, kw_only=True)
class EvaluateCommand(ReportCommand):
    """Play a skill's plan in fresh worlds, and count successes.

    Examples:
      flowrl evaluate exp/demo "Collect Wood" --episodes 256
      flowrl evaluate exp/demo "Place Table" --json
    """

    skill: SkillArgument
    """The skill's name, or its expert number."""
    episodes: Count = EPISODES
    """Episodes to play, each in a world of its own."""
    seed: Seed = SEED
    """Seed of the worlds and actions."""
    record: Natural = 0
    """Record so many episodes in episodes.npz beside the expert, for `flowrl play --recorded`."""
    record_failures: Natural = 0
    """Record so many of the episodes that fail, too."""
    at_least: Share = 0.0
    """Exit with 1 when less than this share of the episodes completes the plan."""
    sandbox: Sandbox = "auto"
    """Confine the evaluation by bubblewrap, with the graph read-only; auto: if it is there."""

    def __call__(self) -> int:
        """Evaluate in a child process and print; returns 1 below `at_least`."""
        report = evaluate(
            self.graph_path,
            self.skill,
            episodes=self.episodes,
            seed=self.seed,
            record=self.record,
            record_failures=self.record_failures,
            sandbox=self.sandbox,
        )
        lines = _lines(report)
        if self.record or self.record_failures:
            seen = GraphPaths(self.graph_path).command("play", report.skill, "--recorded")
            lines.append(f"recorded; watch them by {seen}")
        console.print_report(asdict(report), lines, as_json=self.json)
        return 0 if report.success_rate >= self.at_least else 1


def _lines(report: EvaluationReport) -> list[str]:
    lines = [
        f"{report.skill}: {report.episodes} episodes of the experts of generation "
        f"{report.generation}, {report.mean_episode_length:.0f} steps each"
    ]
    for one in report.steps:
        interval = f"95 % interval {one.low:.1%} to {one.high:.1%}"
        rate = f"{one.success_rate:.1%} succeed ({interval})"
        lines.append(f"{one.count} x {one.skill}, expert {one.expert}: {rate}{_ended(one.ends)}")
    if report.clipped_rewards:
        lines.append(f"{report.clipped_rewards:,} rewards were clipped to ±10,000")
    return lines


def _ended(ends: StepEnds) -> str:
    """The endings of episodes in a step, as the end of a line."""
    killed = "".join(f", {number} of {cause}" for cause, number in ends.causes.items())
    died = f"; {ends.died} died in it{killed}" if ends.died else ""
    return died + (f"; {ends.cut} were cut by the time limit" if ends.cut else "")
