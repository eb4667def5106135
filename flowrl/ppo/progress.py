"""Reporting a run's progress: progress.json, trackers, and lines on the terminal."""

from __future__ import annotations

import logging
import time

from flowrl import runs
from flowrl.config import PPOConfig, flags
from flowrl.envs.base import REWARD_LIMIT
from flowrl.paths import RunPaths, slug
from flowrl.ppo.loop import (
    Counters,
    UpdateReport,
    frames_per_update,
    learning_rate,
    num_updates,
)
from flowrl.ppo.run_io import Assignment
from flowrl.ppo.trackers import Guarded, open_trackers
from flowrl.runs import Progress

logger = logging.getLogger(__name__)
PROGRESS_SECONDS = 1.0
LINE_SECONDS = 5.0


class Reporter:
    """Reports on one run; a full disk silences it, and training goes on."""

    def __init__(
        self, assignment: Assignment, config: PPOConfig, progress: RunPaths | None = None
    ) -> None:
        self._run_paths, self._run = assignment
        self._progress = progress or self._run_paths  # where progress.json lies
        self._config = config
        self._trackers = Guarded([])
        self._shown_at = self._logged_at = self._printed_at = float("-inf")
        self._phase = ""
        self._clipped = 0
        self._begin("compiling", Counters(acted=()))

    def begin_training(self, counters: Counters) -> None:
        """Report that training begins; what was logged beyond `counters` is removed.

        Raises:
          ConfigError: a tracker needs a package that is not installed.
        """
        self._trackers = open_trackers(
            self._run_paths, flags(self._config), run_id=self._run.run_id, frames=counters.frames
        )
        self._begin("training", counters)

    def report(self, update: UpdateReport) -> None:
        """Report an update: at most once in PROGRESS_SECONDS and `--log_seconds`, and the last."""
        now, last = time.monotonic(), update.ended
        share = update.figures.get("clipped_rewards", 0.0)
        self._clipped += round(share * frames_per_update(self._config))
        if last or now - self._shown_at >= PROGRESS_SECONDS:
            self._shown_at = now
            phase = "saving" if last else "training"
            self._show(phase, update.counters, update.rates.step_success)
        if last or now - self._logged_at >= self._config.log_seconds:
            self._logged_at = now
            self._trackers.log(self._figures(update), frames=update.counters.frames)

    def close(self) -> None:
        """Close the trackers."""
        self._trackers.close()

    def _begin(self, phase: str, counters: Counters) -> None:
        self._began = (time.monotonic(), counters.frames)
        self._show(phase, counters, (0.0,) * len(self._run.plan))

    def _show(self, phase: str, counters: Counters, step_success: tuple[float, ...]) -> None:
        """Write progress.json, and a line at every change of phase and every LINE_SECONDS."""
        progress = Progress.since(
            self._began,
            run_id=self._run.run_id,
            updates=counters.updates,
            frames=counters.frames,
            total_frames=num_updates(self._config) * frames_per_update(self._config),
            step_success=step_success,
            phase=phase,
        )
        now = time.monotonic()
        if phase != self._phase or now - self._printed_at >= LINE_SECONDS:
            self._phase, self._printed_at = phase, now
            shares = zip(self._run.plan, step_success, strict=True)
            steps = ", ".join(f"{step.skill} {share:.0%}" for step, share in shares)
            line = progress.line()
            if self._clipped:
                line += f" · {self._clipped:,} rewards clipped to ±{REWARD_LIMIT:,.0f}"
            logger.info("%s | %s", line, steps)
        try:
            runs.write_progress(self._progress, progress)
        except OSError as error:
            logger.warning("progress.json cannot be written: %s", error)

    def _figures(self, update: UpdateReport) -> dict[str, float]:
        counters, rates, plan = update.counters, update.rates, self._run.plan
        success = {
            f"success/{number}_{slug(step.skill)}": share
            for number, (step, share) in enumerate(zip(plan, rates.step_success, strict=True))
        }
        acted = zip(self._run.experts, counters.acted, strict=True)
        return {
            "updates": counters.updates,
            "seconds": counters.seconds,
            "steps_per_second": runs.speed_since(self._began, counters.frames),
            "success_rate": rates.success,
            **success,
            "mean_episode_length": rates.mean_episode_length,
            "mean_episode_return": rates.mean_episode_return,
            "lr": learning_rate(self._config, counters.updates - 1),
            **update.figures,
            **{f"acted/expert_{expert}": frames for expert, frames in acted},
        }
