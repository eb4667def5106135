"""Telling of a run while it goes on: progress.json, trackers and the display."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from flowrl import runs
from flowrl.config import PPOConfig
from flowrl.paths import slug
from flowrl.ppo.assignment import Assignment
from flowrl.ppo.display import Display, open_display
from flowrl.ppo.trackers import Tracker, open_trackers
from flowrl.ppo.train import Counters, Turn, frames_per_update, learning_rate, num_updates
from flowrl.runs import Progress

logger = logging.getLogger(__name__)
PROGRESS_SECONDS = 1.0
TRAINING = "training"


class Reporter:
    """Tells of one run; a disk that is full silences it, and training goes on."""

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
        layout, run_id = assignment.layout, assignment.run_id
        self._tracker = tracker or open_trackers(layout, config, run_id=run_id)
        self._display = display or open_display(assignment.plan)
        self._clock = clock
        self._shown_at = self._logged_at = float("-inf")
        self._since = (clock(), 0)  # when, and after how many frames, training began

    def phase(self, phase: str, counters: Counters) -> None:
        """Tell that a phase begins; what was logged beyond where training begins is unsaid."""
        self._since = (self._clock(), counters.frames)
        if phase == TRAINING:
            self._tracker.rewind(counters.frames)
        self._show(phase, counters, (0.0,) * len(self._assignment.plan))

    def turn(self, turn: Turn) -> None:
        """Tell of an update, when it is time to."""
        now, last = self._clock(), turn.ended
        if last or now - self._shown_at >= PROGRESS_SECONDS:
            self._shown_at = now
            phase = "saving" if last else TRAINING
            self._show(phase, turn.counters, turn.rates.step_success)
        if last or now - self._logged_at >= self._config.log_seconds:
            self._logged_at = now
            self._tracker.log(self._figures(turn), frames=turn.counters.frames)

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
            runs.write_progress(self._assignment.layout, progress)
        except OSError as error:
            logger.warning("progress.json cannot be written: %s", error)

    def _speed(self, counters: Counters) -> float:
        when, frames = self._since
        seconds = self._clock() - when
        return (counters.frames - frames) / seconds if seconds > 0 else 0.0

    def _figures(self, turn: Turn) -> dict[str, float]:
        counters, rates, plan = turn.counters, turn.rates, self._assignment.plan
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
            **turn.figures,
            **{f"acted/expert_{expert}": frames for expert, frames in acted},
        }
