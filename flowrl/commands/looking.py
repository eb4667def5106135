"""Commands that look: status, logs, evaluate, check."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from flowrl.config import Count
from flowrl.paths import DEFAULT_GRAPH
from flowrl.report import check, logs, status


@dataclass(frozen=True, kw_only=True)
class Status:
    """Show every skill of a graph: status, expert, speed, success, what it waits for.

    Examples:
      flowrl status
      flowrl status exp/demo --watch
      flowrl status exp/demo --json | jq '.skills[].status'
    """

    graph_path: tyro.conf.Positional[Path] = DEFAULT_GRAPH
    """Folder of the graph."""
    watch: bool = False
    """Show it again every second until everything has ended or Ctrl-C."""
    json: bool = False
    """Print JSON instead of a table."""

    def __call__(self) -> int:
        """Run the command."""
        return status.show(self.graph_path, watch=self.watch, as_json=self.json)


@dataclass(frozen=True, kw_only=True)
class Logs:
    """Print the newest training log of a skill.

    Examples:
      flowrl logs "Collect Wood"
      flowrl logs collect_wood --graph-path exp/demo -f
    """

    skill: tyro.conf.Positional[str]
    """The skill's name, or its expert number."""
    graph_path: Path = DEFAULT_GRAPH
    """Folder of the graph."""
    follow: Annotated[bool, tyro.conf.arg(aliases=["-f"])] = False
    """Go on printing as the log grows, until the run has ended or Ctrl-C."""

    def __call__(self) -> int:
        """Run the command."""
        return logs.show(self.graph_path, self.skill, follow=self.follow)


@dataclass(frozen=True, kw_only=True)
class Evaluate:
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
        """Run the command."""
        from flowrl import evaluate  # it loads jax

        return evaluate.show(self)


@dataclass(frozen=True, kw_only=True)
class Check:
    """Say in one line per skill file what is wrong with it; exit 1 when something is.

    Examples:
      flowrl check my_skills/*.py
      flowrl check my_skills/*.py --no-trace
      flowrl check my_skills/*.py --json | jq '.[].games'
    """

    files: tyro.conf.Positional[tuple[Path, ...]]
    """Skill files."""
    trace: bool = True
    """Also trace the functions in a process with limits, and compute them in known states."""
    json: bool = False
    """Print JSON: for every file the games it is good for, or why it is refused."""

    def __call__(self) -> int:
        """Run the command."""
        return check.show(self.files, trace=self.trace, as_json=self.json)
