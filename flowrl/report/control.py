"""`flowrl retry`: a request left in the graph's folder, which its scheduler takes up."""

from __future__ import annotations

import sys
from pathlib import Path

from flowrl.errors import GraphError
from flowrl.layout import GraphLayout
from flowrl.parallel import requests
from flowrl.report.snapshot import find_row, read_rows

_RETRIED = {"failed", "held"}


def ask_retry(graph_path: Path, skill: str) -> int:
    """Ask the scheduler to retry a skill.

    Raises:
      GraphError: there is no such skill, or it is neither failed nor held.
    """
    layout = GraphLayout(graph_path)
    row = find_row(read_rows(layout), skill, graph_path)
    if row.status not in _RETRIED:
        raise GraphError(f"{row.skill} is {row.status}; only failed and held skills can be retried")
    requests.ask(layout, "retry", row.skill)
    sys.stdout.write(
        f"{row.skill} will be tried again by the scheduler of {graph_path}; if none runs, start "
        f"python -m flowrl.bottomup_parallel --graph_path {graph_path}\n"
    )
    return 0
