"""`flowrl status`: every skill of a graph at a glance."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from flowrl import notices
from flowrl.errors import FileRefusedError
from flowrl.experts.store import ExpertStore
from flowrl.parallel.health import disk_shortage
from flowrl.paths import GraphPaths
from flowrl.report.snapshot import SkillRow, all_ended, read_rows, read_stop_mode
from flowrl.report.summary import last_words
from flowrl.report.table import skill_table, tally

_WATCH_SECONDS = 1.0
_WIDTH = 140  # into a file or a pipe


def show(graph_path: Path, *, watch: bool, as_json: bool) -> int:
    """Print the status once, or again and again until nothing moves."""
    layout = GraphPaths(graph_path)
    if as_json:
        _print_json(layout)
        while watch and not all_ended(read_rows(layout)):
            time.sleep(_WATCH_SECONDS)
            _print_json(layout)
        return 0
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    rows = read_rows(layout)
    if not watch:
        console.print(Group(screen(layout, rows), *map(Text, _last(rows))))
        return 0
    with Live(screen(layout, rows), console=console, auto_refresh=False) as live:
        while not all_ended(rows):
            time.sleep(_WATCH_SECONDS)
            rows = read_rows(layout)
            live.update(screen(layout, rows), refresh=True)
    return 0


def screen(layout: GraphPaths, rows: list[SkillRow]) -> Group:
    """The table under its heading."""
    said = [Text(text, style="yellow") for text in _notices(layout).values()]
    stop = [Text(text, style="yellow") for text in [read_stop_mode(layout)] if text]
    logs = (Text(line, style="dim") for row in rows for line in _log(row))
    return Group(Text(f"{layout.root}: {tally(rows)}"), *stop, *said, "", skill_table(rows), *logs)


def _notices(layout: GraphPaths) -> dict[str, str]:
    """What was noted, a full disk, on which nothing can be noted, and a damaged manifest."""
    said = dict(notices.read(layout))
    if "paused" not in said and (found := disk_shortage(layout)):
        said["paused"] = f"paused ({found[0]}): {found[1]}"
    try:
        ExpertStore(layout).manifest()
    except FileRefusedError as error:
        said["manifest"] = f"the graph cannot go on: {error}"
    return said


def _log(row: SkillRow) -> list[str]:
    """The last lines of a failed skill's log under a heading."""
    if not row.log:
        return []
    return ["", f"{row.skill}, the last lines of its log:", *(f"  {line}" for line in row.log)]


def _last(rows: list[SkillRow]) -> list[str]:
    """What an ended graph's training has come to."""
    return ["", *last_words(rows)[1:]] if all_ended(rows) else []


def facts(layout: GraphPaths) -> dict[str, Any]:
    """The status as JSON values, for scripts."""
    rows = read_rows(layout)
    return {
        "graph": str(layout.root),
        "ended": all_ended(rows),
        "stopping": read_stop_mode(layout),
        "notices": _notices(layout),
        "skills": [asdict(row) for row in rows],
    }


def _print_json(layout: GraphPaths) -> None:
    sys.stdout.write(json.dumps(facts(layout), indent=2) + "\n")
    sys.stdout.flush()
