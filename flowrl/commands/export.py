"""`flowrl export`, its flags and output: a leaf, because the work loads jax."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from flowrl.arguments import GraphCommand
from flowrl.paths import GraphPaths


@dataclass(frozen=True, kw_only=True)
class ExportCommand(GraphCommand):
    """Write the merged agent to a folder of plain files.

    In Python, `flowrl.load_agent("agent").play("Collect Wood")` then acts in a fresh world.

    Examples:
      flowrl export exp/demo -o agent
    """

    output: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = Path("agent")
    """The new folder: agent.json, experts as safetensors, and the plan of each skill."""

    def __call__(self) -> int:
        """Export, and print what."""
        from flowrl.agent import export_agent

        record = export_agent(GraphPaths(self.graph_path), self.output)
        names = ", ".join(each.skill for each in record.experts)
        sys.stdout.write(
            f"{self.output}: the experts of generation {record.generation} for "
            f"{record.env_name}: {names}\n"
        )
        return 0
