"""`flowrl status`, the scheduler's own screen, and the summary when a graph has ended."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from flowrl import notices
from flowrl.commands.skill_rows import SkillRow, all_ended, read_rows, read_stop_mode
from flowrl.errors import FileRefusedError
from flowrl.experts.store import ExpertStore
from flowrl.parallel.health import disk_shortage
from flowrl.paths import DEFAULT_GRAPH, GraphPaths

_WATCH_SECONDS = 1.0
_WIDTH = 140  # columns in a file or a pipe
_STYLE = {
    "completed": "green",
    "running": "cyan",
    "merging": "cyan",
    "preparing": "cyan",
    "failed": "bold red",
    "held": "yellow",
    "blocked": "red",
    "waiting": "dim",
}
_COLUMNS = (
    "skill", "status", "expert", "attempt", "frames", "steps/s", "success", "time", "ETA",
    "waits for / why",
)  # fmt: skip
_LEFT_ALIGNED = frozenset({"skill", "status", "waits for / why"})


@dataclass(frozen=True, kw_only=True)
class StatusCommand:
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
        """Print the status once, or again and again until every skill has ended."""
        paths = GraphPaths(self.graph_path)
        console = Console(width=None if sys.stdout.isatty() else _WIDTH)
        while True:
            rows = read_rows(paths)
            if self.json:
                console.out(json.dumps(status_document(paths), indent=2), highlight=False)
            else:
                if self.watch:
                    console.clear()
                ending = ["", *summary_lines(rows)[1:]] if all_ended(rows) else []
                console.print(Group(screen(paths, rows), *map(Text, ending)))
            if not self.watch or all_ended(rows):
                return 0
            time.sleep(_WATCH_SECONDS)


@contextmanager
def training_screen(paths: GraphPaths, console: Console, *, goal: float) -> Iterator[None]:
    """Keep a live table below the log on a terminal; print the summary at the end."""
    if console.is_terminal:
        with Live(get_renderable=lambda: _now(paths), console=console, refresh_per_second=1):
            yield
    else:
        yield
    console.print(summary(read_rows(paths), goal=goal))


def screen(paths: GraphPaths, rows: Sequence[SkillRow]) -> Group:
    """Return heading, notices, the table of skills, and the logs of failed skills."""
    warnings = [*filter(None, [read_stop_mode(paths)]), *_notices(paths).values()]
    yellow = [Text(text, style="yellow") for text in warnings]
    logs = [Text(line, style="dim") for row in rows for line in _log(row)]
    return Group(Text(f"{paths.root}: {tally(rows)}"), *yellow, "", skill_table(rows), *logs)


def summary(rows: Sequence[SkillRow], *, goal: float | None = None) -> Group:
    """Return the table of skills and the lines of `summary_lines`."""
    return Group("", skill_table(rows), "", *map(Text, summary_lines(rows, goal=goal)))


def summary_lines(rows: Sequence[SkillRow], *, goal: float | None = None) -> list[str]:
    """Return a line on all skills, one on their time, one on those below the success `goal`."""
    lines = [tally(rows)]
    spans = [span for row in rows if (span := _span(row)) is not None]
    if len(spans) > 1:
        wall = (max(end for _, end in spans) - min(start for start, _ in spans)).total_seconds()
        own = sum((end - start).total_seconds() for start, end in spans)
        lines.append(
            f"{clock(wall)} from the first start to the last end; the runs' own times sum up to "
            f"{clock(own)}: {own / wall:.2f} times as fast as one after another"
        )
    completed = (row for row in rows if row.status == "completed")
    short = [row.skill for row in completed if goal and (row.success_rate or 0.0) < goal]
    if goal and short:
        lines.append(f"below the success rate of {goal:.0%} that was asked for: {', '.join(short)}")
    return lines


def skill_table(rows: Sequence[SkillRow]) -> Table:
    """Return a table with one line per skill, without empty columns."""
    table = Table(pad_edge=False, box=None, header_style="bold")
    lines = [_cells(row) for row in rows]
    shown = [name for name in _COLUMNS if any(str(line[name]) for line in lines)]
    for name in shown:
        justify = "left" if name in _LEFT_ALIGNED else "right"
        table.add_column(name, justify=justify, no_wrap=name != _COLUMNS[-1])
    for line in lines:
        table.add_row(*(line[name] for name in shown))
    return table


def tally(rows: Sequence[SkillRow]) -> str:
    """Return how many skills have which status, in one line."""
    counts: dict[str, int] = {}
    for row in rows:
        counts[row.status] = counts.get(row.status, 0) + 1
    return ", ".join(f"{count} {status}" for status, count in counts.items()) or "no skills yet"


def clock(seconds: float | None) -> str:
    """Return seconds as h:mm:ss, and "" for None.

    >>> clock(75.4)
    '0:01:15'
    """
    return "" if seconds is None else str(timedelta(seconds=int(seconds)))


def status_document(paths: GraphPaths) -> dict[str, Any]:
    """Return the status as JSON values, for scripts."""
    rows = read_rows(paths)
    return {
        "graph": str(paths.root),
        "ended": all_ended(rows),
        "stopping": read_stop_mode(paths),
        "notices": _notices(paths),
        "skills": [asdict(row) for row in rows],
    }


def _now(paths: GraphPaths) -> Group:
    try:
        return screen(paths, read_rows(paths))
    except FileRefusedError:
        return Group("starting …")


def _notices(paths: GraphPaths) -> dict[str, str]:
    """Return the notices, a full disk (which no notice can be written to), a damaged manifest."""
    texts = dict(notices.read(paths))
    if "paused" not in texts and (found := disk_shortage(paths)):
        texts["paused"] = f"paused ({found[0]}): {found[1]}"
    try:
        ExpertStore(paths).manifest()
    except FileRefusedError as error:
        texts["manifest"] = f"the graph cannot go on: {error}"
    return texts


def _log(row: SkillRow) -> list[str]:
    """Return the last lines of a failed skill's log under a heading."""
    if not row.log:
        return []
    return ["", f"{row.skill}, the last lines of its log:", *(f"  {line}" for line in row.log)]


def _span(row: SkillRow) -> tuple[datetime, datetime] | None:
    if row.status != "completed" or row.ended_at is None or not row.seconds:
        return None
    end = datetime.fromisoformat(row.ended_at)
    return end - timedelta(seconds=row.seconds), end


def _cells(row: SkillRow) -> dict[str, Text | str]:
    shown = row.phase if row.status == "running" and row.phase else row.status
    reasons = [", ".join(row.waits_for), row.waits, row.why]
    return {
        "skill": Text(row.skill),
        "status": Text(shown, style=_STYLE.get(row.status, "")),
        "expert": "" if row.expert is None else str(row.expert),
        "attempt": "" if row.attempt is None else str(row.attempt),
        "frames": "" if row.frames is None else f"{row.frames:,}",
        "steps/s": "" if row.steps_per_second is None else f"{row.steps_per_second:,.0f}",
        "success": "" if row.success_rate is None else f"{row.success_rate:.0%}",
        "time": clock(row.seconds),
        "ETA": clock(row.eta_seconds),
        "waits for / why": Text("; ".join(filter(None, reasons))),
    }
