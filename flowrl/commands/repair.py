"""Commands that find damage and put it right: fsck, rollback, recover."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro

from flowrl.config import Count
from flowrl.paths import DEFAULT_GRAPH
from flowrl.report import repair


@dataclass(frozen=True, kw_only=True)
class Fsck:
    """Check a graph's folder: digests, ledger, records, leftovers; exit 1 if anything is wrong.

    Examples:
      flowrl fsck exp/demo
      flowrl fsck exp/demo --repair
      flowrl fsck exp/demo --json | jq '.findings[].thing'
    """

    graph_path: tyro.conf.Positional[Path] = DEFAULT_GRAPH
    """Folder of the graph."""
    repair: bool = False
    """Put right what can be, then check again; no scheduler may be at work."""
    json: bool = False
    """Print JSON instead of lines."""

    def __call__(self) -> int:
        """Run the command."""
        return repair.check(self.graph_path, mending=self.repair, as_json=self.json)


@dataclass(frozen=True, kw_only=True)
class Rollback:
    """Let the experts of an earlier generation count again, or list the generations.

    Examples:
      flowrl rollback exp/demo
      flowrl rollback exp/demo 12
    """

    graph_path: tyro.conf.Positional[Path]
    """Folder of the graph."""
    generation: tyro.conf.Positional[Count | None] = None
    """The generation to go back to; without it they are listed."""
    json: bool = False
    """Print JSON instead of a table."""

    def __call__(self) -> int:
        """Run the command."""
        return repair.roll_back(self.graph_path, self.generation, as_json=self.json)


@dataclass(frozen=True, kw_only=True)
class Recover:
    """Make a lost or damaged scheduler_state.json anew from what else is in the folder.

    Examples:
      flowrl recover exp/demo
    """

    graph_path: tyro.conf.Positional[Path] = DEFAULT_GRAPH
    """Folder of the graph."""
    json: bool = False
    """Print JSON instead of lines."""

    def __call__(self) -> int:
        """Run the command."""
        return repair.recover(self.graph_path, as_json=self.json)
