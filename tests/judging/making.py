"""Made-up recordings, runs' results and skills' texts to judge."""

from __future__ import annotations

import numpy as np

from flowrl.judging.judge import PLAN_STEP, RECORDED, Recording, Trajectory
from flowrl.runs import RunResult

NAMES = ("health", PLAN_STEP, "value")


def recording(skill: str = "Dig", *, episodes: int = 200, seed: int = 0) -> Recording:
    """Episodes that succeed the more likely the higher the value that is seen first."""
    rng = np.random.default_rng(seed)
    steps = rng.normal(size=(episodes, RECORDED, len(NAMES))).astype(np.float32)
    steps[..., 1] = 0
    chance = 1 / (1 + np.exp(-3 * steps[:, :8, 2].mean(axis=1) * np.sqrt(8)))
    success = rng.random(episodes) < chance
    lengths = rng.integers(16, 60, size=episodes).astype(np.int32)
    return Recording(skill, NAMES, steps, lengths, success)


def at_step(step: int, skill: str = "Dig") -> Trajectory:
    """An episode that has come to a step of the plan."""
    return Trajectory(skill=skill, names=NAMES, steps=np.array([[9, 0, 0.5], [9, step, 0.5]]))


def result(*step_success: float) -> RunResult:
    return RunResult(
        run_id="r1",
        frames=1,
        experts=(),
        success_rate=step_success[-1],
        step_success=step_success,
        mean_episode_length=9.0,
        updates=1,
        wall_seconds=1.0,
        stopped_early=False,
    )
