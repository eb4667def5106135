"""Pruning is decided from curves alone, and ends what is worse."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from flowrl.measures.objectives import CurvePoint
from flowrl.tuning.pruning import Rungs, score_at, scores_so_far, should_prune
from tests.tuning.making import a_sweep

RUNGS = Rungs(least=10, most=270, eta=3)


def rising(goal, cost=270, step=10):
    return [(spent, goal * spent / 270) for spent in range(step, cost + 1, step)]


def test_rungs_rise_by_eta_up_to_the_whole_cost():
    assert RUNGS.costs() == (10, 30, 90)
    assert Rungs(least=1, most=1000, eta=10).costs() == pytest.approx((1, 10, 100))
    assert Rungs(least=5, most=5).costs() == ()


def test_a_score_is_known_where_the_curve_has_come():
    curve = [(1, 0.1), (5, 0.5)]
    assert [score_at(curve, cost) for cost in (0.5, 1, 4, 5, 6)] == [None, 0.1, 0.1, 0.5, None]
    assert score_at([], 1) is None


def test_trials_are_compared_by_the_objective_and_not_by_success(tmp_path):
    sweep = a_sweep(tmp_path, objective="frames=1")  # frames to the goal of 80 %

    def curve_of(successes):
        points = [
            CurvePoint(1000 * number, 1.0, success, 9.0)
            for number, success in enumerate(successes, start=1)
        ]
        score = lambda curve: sweep.score(curve, curve[-1].success)  # noqa: E731
        return scores_so_far(points, score, most_frames=sweep.horizon)

    early, late = curve_of([0.1, 0.95, 0.92, 0.91]), curve_of([0.1, 0.7, 0.79, 1.0])
    assert [frames for frames, _ in early] == [1000, 2000, 3000, 4000]
    curves = {0: early, **dict.fromkeys(range(1, 6), late)}
    rungs = Rungs(least=4000, most=10_000)
    assert not should_prune(0, curves, rungs)
    assert should_prune(1, {**curves, 6: early, 7: early}, rungs)


def test_a_long_curve_is_scored_at_the_rungs_and_few_other_places():
    points = [CurvePoint(frames, 1.0, frames / 900, 9.0) for frames in range(1, 901)]
    found = scores_so_far(points, lambda curve: curve[-1].success, most_frames=900)
    assert len(found) == 27
    assert score_at(found, 100) == 100 / 900
    assert score_at(found, 300) == 300 / 900
    assert found[-1] == (900, 1.0)


def test_the_worst_of_many_is_ended_and_the_best_is_not():
    curves = {number: rising(0.1 + 0.05 * number) for number in range(15)}
    curves[15], curves[18] = rising(0.01, cost=100), rising(1.0, cost=100)
    assert should_prune(15, curves, RUNGS)
    assert not should_prune(18, curves, RUNGS)


def test_a_trial_alone_or_before_the_first_rung_trains_on():
    many = {number: rising(0.9) for number in range(20)}
    assert not should_prune(20, {20: rising(0.0)}, RUNGS)
    assert not should_prune(20, {**many, 20: [(9, 0.0)]}, RUNGS)
    assert not should_prune(20, {**many, 20: []}, RUNGS)
    assert not should_prune(20, many, RUNGS)


def test_equal_trials_all_train_on():
    curves = {number: rising(0.5) for number in range(20)}
    assert not any(should_prune(number, curves, RUNGS) for number in curves)


def test_a_score_that_is_not_finite_is_the_worst():
    curves = {number: rising(0.5) for number in range(20)}
    curves[21] = [(30, math.nan)]
    assert should_prune(21, curves, RUNGS)


def test_the_order_of_the_trials_does_not_matter():
    rng = np.random.default_rng(3)
    curves = {n: rising(rng.random(), cost=int(rng.integers(10, 270))) for n in range(16)}
    decisions = {n: should_prune(n, curves, RUNGS) for n in curves}
    for _ in range(2):
        shuffled = list(curves.items())
        random.shuffle(shuffled)
        assert {n: should_prune(n, dict(shuffled), RUNGS) for n in curves} == decisions


def test_asha_keeps_a_third_at_a_rung():
    curves = {number: [(10, number / 9)] for number in range(9)}
    kept = [number for number in curves if not should_prune(number, curves, RUNGS)]
    assert kept == [6, 7, 8]
