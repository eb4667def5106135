"""`flowrl why`: in which step of its plan a skill fails, and what of; a leaf over run folders."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from flowrl.arguments import ReportCommand, SkillArgument
from flowrl.console import print_report
from flowrl.errors import ConfigError, FileRefusedError
from flowrl.measures.causes import Explanation, explanation_of
from flowrl.measures.episodes import episodes_file, read_episodes
from flowrl.paths import GraphPaths, existing_graph
from flowrl.reports.status import find_row, read_rows
from flowrl.runs import TrainingRun, read_run


@dataclass(frozen=True, kw_only=True)
class WhyCommand(ReportCommand):
    """Say in which step of its plan a skill fails, and why.

    Examples:
      flowrl why exp/demo "Make Iron Pickaxe"
      flowrl why exp/demo "Make Iron Pickaxe" --json | jq '.losses[].lost'
    """

    skill: SkillArgument
    """The skill's name, or its expert number."""

    def __call__(self) -> int:
        """Explain the newest run of the skill that has ended; ConfigError if none has."""
        graph_paths = existing_graph(self.graph_path)
        row = find_row(read_rows(graph_paths), self.skill, self.graph_path)
        explanation = explanation_of(graph_paths, row.skill, row.expert)
        if explanation is None:
            problem = f"no run of {row.skill} in {graph_paths.root} has ended with its counts"
            raise ConfigError(f"{problem}; see flowrl status, or train it")
        run = read_run(graph_paths.archive(row.expert or 0, row.skill))
        see = _see(graph_paths, run, explanation)
        facts = {**asdict(explanation), "see": see}
        print_report(facts, [*_lines(explanation), see], as_json=self.json)
        return 0


def _see(graph_paths: GraphPaths, run: TrainingRun, found: Explanation) -> str:
    """The command that plays a recorded failure in the worst step; "" if none is recorded."""
    if not episodes_file(graph_paths, run).exists():
        return ""
    try:
        for episode in read_episodes(graph_paths, run):
            if not episode.success and episode.steps[-1] == found.worst.step - 1:
                words = ("--recorded", "--first", str(episode.number), "--episodes", "1")
                return f"see it: {graph_paths.command('play', run.skill, *words)}"
    except FileRefusedError as error:
        return f"no episode of it can be seen: {error}"
    return ""


def _lines(found: Explanation) -> list[str]:
    lines = [
        f"{found.skill}: {found.success:.0%} of {found.episodes} episodes succeed; {found.line}"
    ]
    for loss in found.losses:
        own = "" if loss.own_success is None else f" ({loss.own_success:.0%} in its own run)"
        lost = f", {loss.lost:.0%} of the episodes end here by {loss.cause}" if loss.lost else ""
        lines.append(f"{loss.step:3}  {loss.skill}: {loss.success:.0%} of its attempts{own}{lost}")
    for need in found.lost_needs:
        kept = f"{need.after:.0%} still have it, {need.before:.0%} before"
        lines.append(f"{need.need} is lost in step {need.step}, {need.skill}: {kept}")
    return [*lines, f"remedy: {found.remedy}"]
