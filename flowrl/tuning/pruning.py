"""Pruning, alone because benchmarks decide it without trials: which trial should end early.

A curve is `[(cost, score), …]` by rising cost, of a trial that trains or has ended. A trial is
never begun anew: one that passes a rung trains on, so no frame is trained twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from flowrl.measures import objectives

ScoreCurve = Sequence[tuple[float, float]]
Curves = Mapping[int, ScoreCurve]  # by number of trial
Pruner = Literal["asha", "none"]
_PLACES = 27  # of a curve; the rungs at a ninth and a third of the frames are among them


@dataclass(frozen=True, slots=True, kw_only=True)
class Rungs:
    """The costs at which trials are compared: least, least × eta and so on, below most."""

    least: float
    most: float
    eta: float = 3.0

    def costs(self) -> tuple[float, ...]:
        """Return the costs, rising."""
        count = math.ceil(math.log(self.most / self.least, self.eta) - 1e-9)
        return tuple(self.least * self.eta**step for step in range(count))


def scores_so_far(
    curve: objectives.Curve, score: Callable[[objectives.Curve], float], *, most_frames: int
) -> ScoreCurve:
    """Return what a run would have scored, had it ended at the frames of its curve.

    Of each 27th part of the most frames the last point counts.
    """
    ends = {
        math.ceil(_PLACES * point.frames / most_frames): end
        for end, point in enumerate(curve, start=1)
    }
    return [(float(curve[end - 1].frames), score(curve[:end])) for end in ends.values()]


def should_prune(number: int, curves: Curves, rungs: Rungs) -> bool:
    """Return whether a trial is below the best 1/eta of those that reached its newest rung.

    `curves` has its curve and its peers'. Nothing is decided before the first rung. A score that is
    not finite is the worst. Asynchronous successive halving as Li et al. (2020), in the form that
    stops trials.
    """
    finite = {
        key: [(cost, score if math.isfinite(score) else -math.inf) for cost, score in curve]
        for key, curve in curves.items()
    }
    own = finite.get(number, [])
    reached = [cost for cost in rungs.costs() if score_at(own, cost) is not None]
    if not reached:
        return False
    scores = {key: score_at(curve, reached[-1]) for key, curve in finite.items()}
    known = sorted((score for score in scores.values() if score is not None), reverse=True)
    score = scores[number]
    return score is not None and score < known[math.ceil(len(known) / rungs.eta) - 1]


def score_at(curve: ScoreCurve, cost: float) -> float | None:
    """Return the newest score up to this cost; None if the curve has not reached it."""
    if not curve or curve[-1][0] < cost:
        return None
    upto = [score for spent, score in curve if spent <= cost]
    return upto[-1] if upto else None
