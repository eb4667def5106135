"""Reporting a run's progress: progress.json, trackers, and a table or lines on the terminal."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from flowrl import runs
from flowrl.config import PPOConfig
from flowrl.paths import slug
from flowrl.ppo.loop import (
    Counters,
    UpdateReport,
    frames_per_update,
    learning_rate,
    num_updates,
)
from flowrl.ppo.run_io import Assignment
from flowrl.ppo.trackers import Tracker, open_trackers
from flowrl.runs import PlannedStep, Progress

logger = logging.getLogger(__name__)
PROGRESS_SECONDS = 1.0
LINE_SECONDS = 5.0
TRAINING = "training"


class Reporter:
    """Reports on one run; a full disk silences it, and training goes on."""

    def __init__(
        self,
        assignment: Assignment,
        config: PPOConfig,
        *,
        tracker: Tracker | None = None,
        display: Display | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._assignment = assignment
        self._config = config
        paths, run_id = assignment.paths, assignment.run_id
        self._tracker = tracker or open_trackers(paths, config, run_id=run_id)
        self._display = display or open_display(assignment.plan)
        self._clock = clock
        self._shown_at = self._logged_at = float("-inf")
        self._since = (clock(), 0)  # when, and after how many frames, training began

    def begin_phase(self, phase: str, counters: Counters) -> None:
        """Report that a phase begins; before training, remove what was logged beyond `counters`."""
        self._since = (self._clock(), counters.frames)
        if phase == TRAINING:
            self._tracker.rewind(counters.frames)
        self._show(phase, counters, (0.0,) * len(self._assignment.plan))

    def report(self, update: UpdateReport) -> None:
        """Report an update: at most once in PROGRESS_SECONDS and `--log_seconds`, and the last."""
        now, last = self._clock(), update.ended
        if last or now - self._shown_at >= PROGRESS_SECONDS:
            self._shown_at = now
            phase = "saving" if last else TRAINING
            self._show(phase, update.counters, update.rates.step_success)
        if last or now - self._logged_at >= self._config.log_seconds:
            self._logged_at = now
            self._tracker.log(self._figures(update), frames=update.counters.frames)

    def close(self) -> None:
        """Close trackers and display."""
        self._tracker.close()
        self._display.close()

    def _show(self, phase: str, counters: Counters, step_success: tuple[float, ...]) -> None:
        speed = self._speed(counters)
        total = num_updates(self._config) * frames_per_update(self._config)
        progress = Progress(
            run_id=self._assignment.run_id,
            updates=counters.updates,
            frames=counters.frames,
            total_frames=total,
            steps_per_second=speed,
            step_success=step_success,
            eta_seconds=max(0, total - counters.frames) / speed if speed else None,
            phase=phase,
            updated_at=time.time(),
        )
        self._display.show(progress)
        try:
            runs.write_progress(self._assignment.paths, progress)
        except OSError as error:
            logger.warning("progress.json cannot be written: %s", error)

    def _speed(self, counters: Counters) -> float:
        when, frames = self._since
        seconds = self._clock() - when
        return (counters.frames - frames) / seconds if seconds > 0 else 0.0

    def _figures(self, update: UpdateReport) -> dict[str, float]:
        counters, rates, plan = update.counters, update.rates, self._assignment.plan
        success = {
            f"success/{number}_{slug(step.skill)}": share
            for number, (step, share) in enumerate(zip(plan, rates.step_success, strict=True))
        }
        acted = zip(self._assignment.experts, counters.acted, strict=True)
        return {
            "updates": counters.updates,
            "seconds": counters.seconds,
            "steps_per_second": self._speed(counters),
            "success_rate": rates.success,
            **success,
            "mean_episode_length": rates.mean_episode_length,
            "mean_episode_return": rates.mean_episode_return,
            "lr": learning_rate(self._config, counters.updates - 1),
            **update.figures,
            **{f"acted/expert_{expert}": frames for expert, frames in acted},
        }


class Display(Protocol):
    """Shows a run's progress."""

    def show(self, progress: Progress) -> None:
        """Show the newest figures."""
        ...

    def close(self) -> None:
        """End; the last figures stay visible."""
        ...


def open_display(plan: Sequence[PlannedStep], console: Console | None = None) -> Display:
    """A table on a terminal, lines elsewhere."""
    console = console or Console()
    return LiveTable(plan, console) if console.is_terminal else PlainLines(plan, console)


class LiveTable:
    """One row per step of the plan, redrawn in place."""

    def __init__(self, plan: Sequence[PlannedStep], console: Console) -> None:
        self._plan = plan
        # It needs no thread of its own: the training loop redraws it.
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
        title = Text(headline(progress), style="bold", no_wrap=True, overflow="ellipsis")
        self._live.update(Group(title, table), refresh=True)

    def close(self) -> None:
        """Stop redrawing."""
        self._live.stop()


class PlainLines:
    """A line every LINE_SECONDS, and at every change of phase."""

    def __init__(self, plan: Sequence[PlannedStep], console: Console) -> None:
        self._plan = plan
        self._console = console
        self._last: Progress | None = None

    def show(self, progress: Progress) -> None:
        """Write a line if the last one is old enough."""
        last = self._last
        early = last is not None and progress.updated_at - last.updated_at < LINE_SECONDS
        if last is not None and early and progress.phase == last.phase:
            return
        self._last = progress
        shares = zip(self._plan, progress.step_success, strict=True)
        steps = ", ".join(f"{step.skill} {share:.0%}" for step, share in shares)
        self._console.print(Text(f"{headline(progress)} | {steps}"), soft_wrap=True)

    def close(self) -> None:
        """Nothing to do: every line is written already."""


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
