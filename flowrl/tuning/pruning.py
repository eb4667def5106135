"""Pruning, alone because benchmarks decide it without trials: which trial should end early.

A trial is never begun anew: one that passes a rung trains on, so no frame is trained twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from flowrl.measures import objectives

RungScores = Mapping[float, float]  # of a trial, its score at each rung that it has reached
Pruner = Literal["asha", "none"]
_ETA = 3  # one of so many trials passes a rung


def scores_at(
    rungs: Sequence[float],
    curve: objectives.Curve,
    score: Callable[[objectives.Curve], float],
    *,
    ended: bool = False,
) -> RungScores:
    """Return what a run would have scored, had it ended at the rungs, which are frames.

    A run that has `ended` by itself has reached all of them.
    """
    parts = {rung: [point for point in curve if point.frames <= rung] for rung in rungs}
    reached = math.inf if ended else max((point.frames for point in curve), default=0)
    return {rung: score(part) for rung, part in parts.items() if part and rung <= reached}


def should_prune(number: int, scores: Mapping[int, RungScores]) -> bool:
    """Return whether a trial is below the best third of those that reached its newest rung.

    `scores` has it and its peers, by number. Asynchronous successive halving as Li et al. (2020),
    in the form that stops trials.
    """
    own = scores[number]
    if not own:
        return False
    rung = max(own)
    peers = sorted((each[rung] for each in scores.values() if rung in each), reverse=True)
    return own[rung] < peers[math.ceil(len(peers) / _ETA) - 1]
