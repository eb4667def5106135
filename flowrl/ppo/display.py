"""What a person sees of a run: a live table on a terminal, a line now and then elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from flowrl.runs import PlannedStep, Progress

LINE_SECONDS = 5.0


class Display(Protocol):
    """Shows a run's progress."""

    def show(self, progress: Progress) -> None:
        """Show the newest figures."""
        ...

    def close(self) -> None:
        """Leave the last figures standing."""
        ...


def open_display(plan: Sequence[PlannedStep], console: Console | None = None) -> Display:
    """The display that suits the terminal, or its absence."""
    console = console or Console()
    return LiveTable(plan, console) if console.is_terminal else PlainLines(plan, console)


class LiveTable:
    """One row per step of the plan, redrawn in place."""

    def __init__(self, plan: Sequence[PlannedStep], console: Console) -> None:
        self._plan = plan
        # No thread of its own: the training loop says when to redraw.
        self._live = Live(console=console, auto_refresh=False)
        self._live.start()

    def show(self, progress: Progress) -> None:
        """Redraw."""
        table = Table.grid(padding=(0, 2))
        for step, share in zip(self._plan, progress.step_success, strict=True):
            table.add_row(
                Text(f"{step.skill} × {step.count}"),
                Text(f"expert {step.expert}", style="dim"),
                ProgressBar(total=1.0, completed=share, width=24),
                Text(f"{share:4.0%}"),
            )
        self._live.update(Group(_title(progress), table), refresh=True)

    def close(self) -> None:
        """Stop redrawing."""
        self._live.stop()


class PlainLines:
    """A line every few seconds, and at every change of phase."""

    def __init__(self, plan: Sequence[PlannedStep], console: Console) -> None:
        self._plan = plan
        self._console = console
        self._last: Progress | None = None

    def show(self, progress: Progress) -> None:
        """Write a line when it is time for one."""
        last = self._last
        early = last is not None and progress.updated_at - last.updated_at < LINE_SECONDS
        if last is not None and early and progress.phase == last.phase:
            return
        self._last = progress
        shares = zip(self._plan, progress.step_success, strict=True)
        steps = ", ".join(f"{step.skill} {share:.0%}" for step, share in shares)
        self._console.print(Text(f"{headline(progress)} | {steps}"), soft_wrap=True)

    def close(self) -> None:
        """Nothing is held back."""


def headline(progress: Progress) -> str:
    """Phase, frames, speed and time left, in one line."""
    words = [
        progress.phase,
        f"update {progress.updates:,}",
        f"{progress.frames:,} of {progress.total_frames:,} frames",
    ]
    if progress.steps_per_second > 0:
        words.append(f"{progress.steps_per_second:,.0f} steps/s")
    if progress.eta_seconds is not None:
        words.append(f"at most {timedelta(seconds=round(progress.eta_seconds))} left")
    return " · ".join(words)


def _title(progress: Progress) -> Text:
    return Text(headline(progress), style="bold", no_wrap=True, overflow="ellipsis")
