"""What the scheduler's own terminal shows while a graph trains, and at its end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live

from flowrl.errors import FileRefusedError
from flowrl.layout import GraphLayout
from flowrl.report.snapshot import read_rows
from flowrl.report.status import screen
from flowrl.report.summary import summary


@contextmanager
def training_screen(layout: GraphLayout, console: Console) -> Iterator[None]:
    """Keep a live table below the log on a terminal; print the table of results at the end."""
    began = time.monotonic()
    completed = _completed(layout)
    if console.is_terminal:
        with Live(get_renderable=lambda: _now(layout), console=console, refresh_per_second=1):
            yield
    else:
        yield
    rows = read_rows(layout)
    fresh = [row.skill for row in rows if row.status == "completed" and row.skill not in completed]
    console.print(summary(rows, trained_now=fresh, wall_seconds=time.monotonic() - began))


def _now(layout: GraphLayout) -> Group:
    try:
        return screen(layout, read_rows(layout))
    except FileRefusedError:
        return Group("starting …")


def _completed(layout: GraphLayout) -> frozenset[str]:
    """The skills that were completed before this start."""
    if not layout.scheduler_state.exists():
        return frozenset()
    return frozenset(row.skill for row in read_rows(layout) if row.status == "completed")
