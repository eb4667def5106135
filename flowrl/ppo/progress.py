"""Reporting a run's progress: progress.json, trackers, and lines on the terminal."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from flowrl import runs
from flowrl.config import PPOConfig, flags
from flowrl.envs.base import COUNTS, REWARD_LIMIT
from flowrl.errors import FileRefusedError, format_error
from flowrl.measures.objectives import read_curve
from flowrl.paths import RunPaths, slug
from flowrl.ppo.loop import Counters, UpdateReport, frames_per_update, learning_rate, num_updates
from flowrl.ppo.metrics import EpisodeLog
from flowrl.ppo.run_io import Assignment
from flowrl.ppo.trackers import Guarded, open_trackers
from flowrl.runs import REPORT, Progress, StepEnds

logger = logging.getLogger(__name__)
PROGRESS_SECONDS = 1.0
LINE_SECONDS = 5.0
CURVE_SECONDS = 60.0
_BLOCKS, _COLUMNS = " ▁▂▃▄▅▆▇█", 40


class ProgressReporter:
    """Writes progress.json and lines on the terminal; on a full disk training goes on without.

    `report` stands in each line, `facts` are fields of `Progress` that stay.
    """

    def __init__(self, run_paths: RunPaths, *, report: str = REPORT, **facts: Any) -> None:
        self._run_paths, self._report, self._facts = run_paths, report, facts
        self._phase, self._shown_at, self._printed_at = "", 0.0, 0.0
        self.began = (0.0, 0)  # time and frames from which speed counts

    def show(self, phase: str, *, frames: int, ending: str = "", **facts: Any) -> None:
        """Write progress.json once in PROGRESS_SECONDS, and a line once in LINE_SECONDS.

        Both are written at every change of phase, too; speed counts from the end of compiling.
        """
        now, is_new = time.monotonic(), phase != self._phase
        if is_new and self._phase != "training":
            self.began = (now, frames)
        if not is_new and now - self._shown_at < PROGRESS_SECONDS:
            return
        self._phase, self._shown_at = phase, now
        progress = Progress.since(self.began, frames=frames, phase=phase, **self._facts, **facts)
        if is_new or now - self._printed_at >= LINE_SECONDS:
            self._printed_at = now
            logger.info("%s%s", progress.line(self._report), ending)
        try:
            runs.write_progress(self._run_paths, progress)
        except OSError as error:
            logger.warning("progress.json cannot be written: %s", format_error(error))


class Reporter:
    """Reports on the run of a skill; a full disk silences it, and training goes on.

    `step_ends` makes what `Progress` says of the plan's steps from the newest episodes.
    """

    def __init__(
        self,
        assignment: Assignment,
        config: PPOConfig,
        progress: RunPaths | None = None,
        *,
        step_ends: Callable[[EpisodeLog], tuple[StepEnds, ...]] = lambda _: (),
    ) -> None:
        self._run_paths, self._run = assignment
        self._config, self._clipped, self._step_ends = config, 0, step_ends
        self._trackers, self._logged_at = Guarded([]), float("-inf")
        self._progress = ProgressReporter(
            progress or self._run_paths,
            run_id=self._run.run_id,
            total_frames=num_updates(config) * frames_per_update(config),
        )
        self._counts: Any = 0  # since the last line of metrics.jsonl
        self._ended = 0  # episodes, likewise
        self._curve: list[tuple[int, float]] = []  # frames and success
        self._updates, self._drawn_at = 0, time.monotonic()
        self._resumed = False
        self._show("compiling", Counters(acted=()))

    def begin_training(self, counters: Counters) -> None:
        """Report that training begins; what was logged beyond `counters` is removed.

        Raises ConfigError if a tracker needs a package that is not installed.
        """
        self._resumed = counters.updates > 0
        self._trackers = open_trackers(
            self._run_paths, flags(self._config), run_id=self._run.run_id, frames=counters.frames
        )
        with suppress(FileRefusedError):  # somebody has edited it; the curve is for eyes
            points = read_curve(self._run_paths.metrics)
            self._curve = [(point.frames, point.success) for point in points]
        self._show("training", counters)

    def report(self, update: UpdateReport) -> None:
        """Report an update; its figures at most once in `--log_seconds`, and the last."""
        now, last = time.monotonic(), update.ended
        share = update.figures.get("clipped_rewards", 0.0)
        self._clipped += round(share * frames_per_update(self._config))
        self._counts, self._updates = self._counts + update.counts, update.counters.updates
        self._ended += update.ended_episodes
        self._show(
            "saving" if last else "training",
            update.counters,
            update.rates.step_success,
            step_ends=self._step_ends(update.episodes),
        )
        if last or now - self._logged_at >= self._config.log_seconds:
            self._logged_at = now
            self._trackers.log(self._figures(update), frames=update.counters.frames)
            if self._is_known(update):
                self._curve.append((update.counters.frames, update.rates.success))
            self._counts, self._ended = 0, 0
        if now - self._drawn_at >= CURVE_SECONDS:
            self._draw()

    def close(self) -> None:
        """Close the trackers, and draw the curve of success a last time."""
        self._trackers.close()
        self._draw()

    def _draw(self) -> None:
        self._drawn_at = time.monotonic()
        if self._curve:
            logger.info("success%s%s %s", REPORT, f"{self._updates:,}", drawn(self._curve))

    def _show(
        self, phase: str, counters: Counters, success: tuple[float, ...] = (), **facts: Any
    ) -> None:
        plan = self._run.plan
        success = success or (0.0,) * len(plan)
        shares = zip(plan, success, strict=True)
        ending = " | " + ", ".join(f"{step.skill} {share:.0%}" for step, share in shares)
        if self._clipped:
            said = f"{self._clipped:,} rewards clipped to ±{REWARD_LIMIT:,.0f}"
            ending = f" · {said}{ending}"
        done = {"updates": counters.updates, "frames": counters.frames}
        self._progress.show(phase, **done, step_success=success, ending=ending, **facts)

    def _is_known(self, update: UpdateReport) -> bool:
        """Return whether the success is known.

        After a resume it is not, until enough new episodes have ended: running ones count as
        failed.
        """
        return update.rates.full or not self._resumed

    def _figures(self, update: UpdateReport) -> dict[str, float]:
        counters, rates, plan = update.counters, update.rates, self._run.plan
        success = {
            f"success/{number}_{slug(step.skill)}": share
            for number, (step, share) in enumerate(zip(plan, rates.step_success, strict=True))
        }
        counted = {
            f"{name}/{number}_{slug(step.skill)}": int(count)
            for number, (step, row) in enumerate(zip(plan, self._counts, strict=True))
            for name, count in zip(COUNTS, row, strict=False)
        }
        acted = zip(self._run.experts, counters.acted, strict=True)
        return {
            "updates": counters.updates,
            "seconds": counters.seconds,
            "steps_per_second": runs.speed_since(self._progress.began, counters.frames),
            "success_rate": rates.success if self._is_known(update) else math.nan,
            **success,
            **counted,
            "episodes": self._ended,
            "mean_episode_length": rates.mean_episode_length,
            "mean_episode_return": rates.mean_episode_return,
            "lr": learning_rate(self._config, counters.updates - 1),
            **update.figures,
            **{f"acted/expert_{expert}": frames for expert, frames in acted},
        }


def drawn(curve: Sequence[tuple[int, float]]) -> str:
    """Return a curve of success over frames, which rise, in one line of blocks.

    >>> drawn([(1, 0.0), (500, 0.5), (1000, 0.25)])
    '▕  ▁▁▁▁▁▂▂▂▂▂▃▃▃▃▃▄▄▄▄▄▄▄▄▄▄▃▃▃▃▃▃▃▃▂▂▂▂▂▏ 25%; 0 to 100% over 1,000 frames'
    """
    frames, success = zip(*curve, strict=True)
    levels = np.interp(np.linspace(0, frames[-1], _COLUMNS), frames, success)
    blocks = "".join(_BLOCKS[round(8 * level)] for level in levels.tolist())
    return f"▕{blocks}▏ {success[-1]:.0%}; 0 to 100% over {frames[-1]:,} frames"
