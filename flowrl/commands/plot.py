"""`flowrl plot`, its flags and output."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from flowrl import storage
from flowrl.arguments import GraphCommand
from flowrl.errors import ConfigError
from flowrl.output import check_output
from flowrl.paths import existing_graph, printable
from flowrl.reports.status import find_row, read_rows
from flowrl.viewing.plots import ENDINGS, graph_picture, newest_metrics, read_lines, skill_picture


@dataclass(frozen=True, kw_only=True)
class PlotCommand(GraphCommand):
    """Draw how a graph or a skill learns.

    Examples:
      flowrl plot exp/demo -o graph.svg
      flowrl plot exp/demo "Collect Coal" -o coal.png
    """

    skill: tyro.conf.Positional[str | None] = None
    """The skill's name, or its expert number (default: the whole graph)."""
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = Path("plot.svg")
    """File of the picture: .svg, .png or .pdf."""

    def __call__(self) -> int:
        """Draw, and write the file; raises ConfigError if there is nothing to draw yet."""
        check_output(self.output, endings=ENDINGS)
        if self.skill is not None and not self.graph_path.exists():
            what = f"there is neither a graph {self.graph_path} nor one {printable(self.skill)}"
            raise ConfigError(f"{what}; name the folder of a graph: flowrl plot GRAPH [SKILL]")
        graph_paths = existing_graph(self.graph_path)
        rows = read_rows(graph_paths)
        if self.skill is None:
            content = graph_picture(graph_paths, rows, self.output.suffix)
        else:
            row = find_row(rows, self.skill, self.graph_path)
            path = newest_metrics(graph_paths, row)
            lines = read_lines(path) if path else []
            content = skill_picture(row.skill, lines, self.output.suffix)
        storage.make_dir(self.output.parent)
        storage.write_atomic(self.output, content)
        sys.stdout.write(f"{self.output}: {len(content) / 1e3:.0f} kB\n")
        return 0
