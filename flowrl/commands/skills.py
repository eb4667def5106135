"""`flowrl plan` and `flowrl skills`: how a skill is reached, and which skills there are."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flowrl.arguments import Count, GraphArgument, ReportCommand, SkillArgument
from flowrl.config import BottomUpConfig, with_flags
from flowrl.console import print_report
from flowrl.errors import ConfigError
from flowrl.parallel.recovery import recorded_config
from flowrl.parallel.skill_sources import SkillSources, check_graph_record, open_graph
from flowrl.paths import DEFAULT_GRAPH, GraphPaths, refuse_other_folder, slug
from flowrl.reports.status import WIDTH, read_rows
from flowrl.skills.graph import SkillGraph

_NEW = "not begun"


@dataclass(frozen=True, kw_only=True)
class SkillsOfGraph(ReportCommand):
    """The flags of a command about the skills that a graph has, or would begin with."""

    graph_path: GraphArgument = DEFAULT_GRAPH
    """Folder of the graph; where it does not exist, the skills are those of a new graph."""
    env_name: str | None = None
    """The game (default: the graph's)."""
    skills_dir: Path | None = None
    """Folder of your own skill files (default: that of the graph's last start)."""

    def _graph(self) -> SkillGraph:
        """The skills of the library and of files; for skills in training, the kept source."""
        refuse_other_folder(self.graph_path)
        graph_paths = GraphPaths(self.graph_path)
        begun = graph_paths.config_json.exists() or graph_paths.graph_json.exists()
        config = recorded_config(graph_paths) if begun else BottomUpConfig()
        given = {"env_name": self.env_name, "skills_dir": self.skills_dir}
        config = with_flags(config, **{name: value for name, value in given.items() if value})
        check_graph_record(graph_paths, config.ppo)
        return open_graph(config, SkillSources(graph_paths))

    def _statuses(self) -> dict[str, str]:
        graph_paths = GraphPaths(self.graph_path)
        rows = read_rows(graph_paths) if graph_paths.scheduler_state.is_file() else ()
        return {row.skill: row.status for row in rows}


@dataclass(frozen=True, kw_only=True)
class PlanCommand(SkillsOfGraph):
    """Show the steps to a skill, and which skill provides what.

    Examples:
      flowrl plan "Make Iron Pickaxe"
      flowrl plan exp/demo "Make Wood Pickaxe" --json | jq '.steps[].skill'
    """

    skill: SkillArgument
    """The skill's name."""
    count: Count = 1
    """How often: the level that its last step reaches."""

    def __call__(self) -> int:
        """Print the plan; raises GraphError if the skill is unknown or has none."""
        graph, statuses = self._graph(), self._statuses()
        wanted = slug(self.skill).casefold()
        names = [name for name in graph.skills if slug(name).casefold() == wanted]
        name = names[0] if names else self.skill
        plan = graph.plan(name, self.count)
        if self.count > 1 and not any(each.per for each in graph.skills[name].gain.values()):
            raise ConfigError(f"--count {self.count}: {name} gains no more by it; leave it out")
        choices = {step.skill: graph.choices(step.skill) for step in plan}
        steps = [{"skill": step.skill, "count": step.count} for step in plan]
        chosen = [each for of_step in choices.values() for each in of_step]
        lines = []
        for number, step in enumerate(plan, 1):
            needs = ", ".join(f"{each.item} from {each.provider}" for each in choices[step.skill])
            status = statuses.get(step.skill, _NEW)
            lines.append(
                f"{number:3}  {step.skill} × {step.count}, {status}{needs and f'; {needs}'}"
            )
        for each in (each for each in chosen if each.others):
            others = f"{each.item} from {each.provider}, not {', '.join(each.others)}: {each.why}"
            lines.append(f"{each.skill} has {others}")
        facts = {"skill": name, "steps": steps, "choices": list(map(dataclasses.asdict, chosen))}
        print_report(facts, lines, as_json=self.json)
        return 0


@dataclass(frozen=True, kw_only=True)
class SkillsCommand(SkillsOfGraph):
    """List the skills of a graph or a game, with their state.

    Examples:
      flowrl skills
      flowrl skills exp/demo --skills_dir my_skills
      flowrl skills --env_name Craftax-Symbolic-v1 --json | jq '.[].skill'
    """

    def __call__(self) -> int:
        """Print one line for each skill, each after those that it needs."""
        graph, statuses = self._graph(), self._statuses()
        rows: list[dict[str, Any]] = [
            {
                "skill": name,
                "from": "library" if graph.skills[name].embedded else "own file",
                "status": statuses.get(name, _NEW),
                "needs": list(graph.needs(name)),
            }
            for name in graph.order()
        ]
        if self.json:
            print_report(rows, (), as_json=True)
            return 0
        table = Table(pad_edge=False, box=None, header_style="bold")
        for title in ("skill", "from", "status", "needs"):
            table.add_column(title, no_wrap=title != "needs")
        for row in rows:
            table.add_row(
                *(Text(str(row[key])) for key in ("skill", "from", "status")),
                Text(", ".join(row["needs"])),
            )
        Console(width=None if sys.stdout.isatty() else WIDTH).print(table)
        return 0
