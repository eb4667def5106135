"""Commands that steer a scheduler from another terminal."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro

from flowrl.layout import DEFAULT_GRAPH
from flowrl.report import control


@dataclass(frozen=True, kw_only=True)
class Retry:
    """Let a failed or held skill train again; works while the daemon is up or down.

    Examples:
      flowrl retry "Collect Iron" --graph-path exp/demo
    """

    skill: tyro.conf.Positional[str]
    """The skill's name, or its expert number."""
    graph_path: Path = DEFAULT_GRAPH
    """Folder of the graph."""

    def __call__(self) -> int:
        """Run the command."""
        return control.ask_retry(self.graph_path, self.skill)
