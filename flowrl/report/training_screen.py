"""What the scheduler's own terminal shows while a graph trains, and at its end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live

from flowrl.errors import FileRefusedError
from flowrl.paths import GraphPaths
from flowrl.report.snapshot import read_rows
from flowrl.report.status import screen
from flowrl.report.summary import summary


@contextmanager
def training_screen(
    layout: GraphPaths, console: Console, *, goal: float, live: bool = True
) -> Iterator[None]:
    """Keep a live table below the log on a terminal; print the table of results at the end."""
    if live and console.is_terminal:
        with Live(get_renderable=lambda: _now(layout), console=console, refresh_per_second=1):
            yield
    else:
        yield
    console.print(summary(read_rows(layout), goal=goal))


def _now(layout: GraphPaths) -> Group:
    try:
        return screen(layout, read_rows(layout))
    except FileRefusedError:
        return Group("starting …")
