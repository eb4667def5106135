"""Pruning is decided from scores alone, and ends what is worse."""

from __future__ import annotations

import random

import numpy as np

from flowrl.measures.objectives import CurvePoint
from flowrl.tuning.pruning import scores_at, should_prune
from tests.tuning.making import a_sweep

RUNGS = (10, 30, 90)


def rising(goal, cost=270):
    """The scores of a trial that has come so far, as it rises to its goal at 270."""
    return {rung: goal * rung / 270 for rung in RUNGS if rung <= cost}


def success(curve):
    return curve[-1].success


def test_a_score_is_known_at_the_rungs_to_which_the_curve_has_come():
    curve = [CurvePoint(20, 1.0, 0.1, 9.0), CurvePoint(50, 2.0, 0.5, 9.0)]
    assert scores_at(RUNGS, curve, success) == {30: 0.1}
    assert scores_at(RUNGS, curve, success, ended=True) == {30: 0.1, 90: 0.5}
    assert scores_at(RUNGS, [*curve, CurvePoint(90, 3.0, 0.6, 9.0)], success)[90] == 0.6
    assert scores_at(RUNGS, [], success, ended=True) == {}


def test_trials_are_compared_by_the_objective_and_not_by_success(tmp_path):
    sweep = a_sweep(tmp_path, objective="frames=1")  # frames to the goal of 80 %

    def scores_of(successes):
        points = [
            CurvePoint(1000 * number, 1.0, success, 9.0)
            for number, success in enumerate(successes, start=1)
        ]
        return scores_at([4000], points, lambda curve: sweep.score(curve, curve[-1].success))

    early, late = scores_of([0.1, 0.95, 0.92, 0.91]), scores_of([0.1, 0.7, 0.79, 1.0])
    scores = {0: early, **dict.fromkeys(range(1, 6), late)}
    assert not should_prune(0, scores)
    assert should_prune(1, {**scores, 6: early, 7: early})


def test_the_worst_of_many_is_ended_and_the_best_is_not():
    scores = {number: rising(0.1 + 0.05 * number) for number in range(15)}
    scores[15], scores[18] = rising(0.01, cost=100), rising(1.0, cost=100)
    assert should_prune(15, scores)
    assert not should_prune(18, scores)


def test_a_trial_alone_or_before_the_first_rung_trains_on():
    many = {number: rising(0.9) for number in range(20)}
    assert not should_prune(20, {20: rising(0.0)})
    assert not should_prune(20, {**many, 20: {}})


def test_equal_trials_all_train_on():
    scores = {number: rising(0.5) for number in range(20)}
    assert not any(should_prune(number, scores) for number in scores)


def test_the_order_of_the_trials_does_not_matter():
    rng = np.random.default_rng(3)
    scores = {n: rising(rng.random(), cost=int(rng.integers(10, 270))) for n in range(16)}
    decisions = {n: should_prune(n, scores) for n in scores}
    for _ in range(2):
        shuffled = list(scores.items())
        random.shuffle(shuffled)
        assert {n: should_prune(n, dict(shuffled)) for n in scores} == decisions


def test_asha_keeps_a_third_at_a_rung():
    scores = {number: {10: number / 9} for number in range(9)}
    kept = [number for number in scores if not should_prune(number, scores)]
    assert kept == [6, 7, 8]
