"""`flowrl status`, its flags and output: a leaf; `reports/status.py` makes what it shows."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass

from rich.console import Console

from flowrl.arguments import GraphArgument
from flowrl.errors import EXIT_UNAVAILABLE
from flowrl.parallel.health import daemon_of
from flowrl.paths import DEFAULT_GRAPH, graph_or_sweep
from flowrl.reports.status import WIDTH, all_ended, read_rows, screen, settings, status_document

_WATCH_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class StatusCommand:
    """Show every skill of a graph, and what it waits for.

    Examples:
      flowrl status
      flowrl status exp/demo --watch
      flowrl status exp/demo --json | jq '.skills[].status'
    """

    graph_path: GraphArgument = DEFAULT_GRAPH
    """Folder of the graph."""
    watch: bool = False
    """Show it again every second until everything has ended or Ctrl-C."""
    verbose: bool = False
    """Also show the settings of each skill's newest run that are no defaults, and their origin."""
    json: bool = False
    """Print JSON instead of a table."""

    def __call__(self) -> int:
        """Print the status once, or again and again until every skill has ended.

        Returns 69 if there is no scheduler though something is left to do, else 0.
        """
        graph_paths = graph_or_sweep(self.graph_path)
        console = Console(width=None if sys.stdout.isatty() else WIDTH)
        while True:
            # Before the rows are read: it may end now.
            lives = daemon_of(graph_paths.daemon_lock) is not None
            rows = read_rows(graph_paths)
            if self.json:
                console.out(json.dumps(status_document(graph_paths), indent=2), highlight=False)
            else:
                if self.watch:
                    console.clear()
                console.print(screen(graph_paths, rows, width=console.width))
                for line in settings(graph_paths, rows) if self.verbose else ():
                    console.print(line, highlight=False, markup=False)
            if all_ended(rows):
                return 0
            if not self.watch:
                return 0 if lives else EXIT_UNAVAILABLE
            time.sleep(_WATCH_SECONDS)
