"""Runs that are stuck are ended, and runs that rise are left alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from flowrl.measures.convergence import verdict
from flowrl.measures.objectives import CurvePoint
from tests.judging.simulated import LENGTH, POINTS, reported, rising, stuck

LOST = 0.1  # success that a run which was ended would still have gained


def stopped_at(curve, *, episodes, goal=1.0):
    """The share of the budget at which a run would be ended; 1.0 if it would not."""
    budget = episodes * LENGTH
    looks = {point.frames * 24 // budget: number for number, point in reversed([*enumerate(curve)])}
    for number in sorted(looks.values()):
        if verdict(curve[: number + 1], budget_frames=budget, goal=goal) == "stuck":
            return (number + 1) / POINTS
    return 1.0


@pytest.mark.parametrize("drift", [0.0, 0.05])
@pytest.mark.parametrize(
    ("curves", "episodes"),
    [
        pytest.param(150, 20_000, id="150"),
        *(pytest.param(1000, n, marks=pytest.mark.slow) for n in (7_000, 20_000, 100_000)),
    ],
)
def test_runs_that_rise_are_seldom_ended_early(curves, episodes, drift):
    random, early = np.random.default_rng(0), 0
    for _ in range(curves):
        shape = rising(random)
        share = stopped_at(
            reported(shape, random, episodes=episodes, drift=drift), episodes=episodes
        )
        end, left = shape(np.array([1.0, share]))
        early += end - left > LOST
    print(f"{early} of {curves} rising curves ended early: {episodes} episodes, drift {drift}")
    assert early <= 0.05 * curves


@pytest.mark.parametrize(
    ("curves", "episodes"),
    [(150, 20_000), *(pytest.param(1000, n, marks=pytest.mark.slow) for n in (20_000, 100_000))],
)
def test_stuck_runs_are_ended_within_half_their_budget(curves, episodes):
    random, ended = np.random.default_rng(1), 0
    for _ in range(curves):
        curve = reported(stuck(random), random, episodes=episodes)
        ended += stopped_at(curve, episodes=episodes) <= 0.5
    print(f"{ended} of {curves} stuck curves ended within half their budget: {episodes} episodes")
    assert ended >= 0.9 * curves


def test_a_run_at_its_goal_has_reached_it():
    assert verdict([CurvePoint(10, 1.0, 0.8, 5.0)], budget_frames=20, goal=0.8) == "reached"


@pytest.mark.parametrize("points", [0, 1, 5])
def test_a_curve_of_few_points_is_not_judged(points):
    curve = [CurvePoint(100 * n + 900, 1.0, 0.0, 5.0) for n in range(points)]
    assert verdict(curve, budget_frames=1000, goal=0.8) == "rising"


def test_the_first_third_of_a_budget_is_not_judged():
    curve = [CurvePoint(n, 1.0, 0.0, 1.0) for n in range(1, 333)]
    assert verdict(curve, budget_frames=1000, goal=0.8) == "rising"
    flat = [CurvePoint(n, 1.0, 0.0, 1.0) for n in range(1, 335)]
    assert verdict(flat, budget_frames=1000, goal=0.8) == "stuck"


def test_the_verdict_changes_only_at_looks():
    random = np.random.default_rng(3)
    curve = reported(stuck(random), random, episodes=20_000)
    found = [verdict(curve[:n], budget_frames=2_000_000, goal=1.0) for n in range(1, POINTS + 1)]
    looks = [point.frames * 24 // 2_000_000 for point in curve]
    assert "stuck" in found
    assert all(looks[n] > looks[n - 1] for n in range(1, POINTS) if found[n] != found[n - 1])


RECORDED = json.loads((Path(__file__).parents[1] / "data" / "recorded_curves.json").read_text())


def test_runs_that_were_recorded_lose_little_success_and_save_frames():
    """Runs of Classic to the end of their budget, one of each skill; the goal is out of reach."""
    lost, spent, whole = [], 0, 0
    for points in RECORDED.values():
        curve = [CurvePoint(frames, 0.0, success, length) for frames, success, length in points]
        budget = curve[-1].frames
        ends = [
            n
            for n in range(1, len(curve) + 1)
            if verdict(curve[:n], budget_frames=budget, goal=1.1) == "stuck"
        ]
        end = ends[0] if ends else len(curve)
        best, kept = (max(point.success for point in part) for part in (curve, curve[:end]))
        lost.append(best - kept)
        spent, whole = spent + curve[end - 1].frames, whole + budget
    print(
        f"{len(lost)} recorded runs: {1 - spent / whole:.0%} of frames saved, success lost "
        f"{sum(lost) / len(lost):.3f} in the mean, {max(lost):.3f} at most"
    )
    assert spent < 0.85 * whole
    assert max(lost) < 0.08
