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
from flowrl.layout import GraphLayout
from flowrl.report.snapshot import SkillRow, all_ended, read_rows
from flowrl.report.summary import last_words
from flowrl.report.table import skill_table, tally

_WATCH_SECONDS = 1.0
_WIDTH = 140  # into a file or a pipe


def show(graph_path: Path, *, watch: bool, as_json: bool) -> int:
    """Print the status once, or again and again until nothing moves."""
    layout = GraphLayout(graph_path)
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


def screen(layout: GraphLayout, rows: list[SkillRow]) -> Group:
    """The table under its heading."""
    said = [Text(text, style="yellow") for text in notices.read(layout).values()]
    return Group(Text(f"{layout.root}: {tally(rows)}"), *said, "", skill_table(rows))


def _last(rows: list[SkillRow]) -> list[str]:
    """What an ended graph's training has come to."""
    return ["", *last_words(rows)[1:]] if all_ended(rows) else []


def facts(layout: GraphLayout) -> dict[str, Any]:
    """The status as JSON values, for scripts."""
    rows = read_rows(layout)
    return {
        "graph": str(layout.root),
        "ended": all_ended(rows),
        "notices": dict(notices.read(layout)),
        "skills": [asdict(row) for row in rows],
    }


def _print_json(layout: GraphLayout) -> None:
    sys.stdout.write(json.dumps(facts(layout), indent=2) + "\n")
    sys.stdout.flush()
