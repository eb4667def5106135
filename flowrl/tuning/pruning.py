"""Pruning: whether a trial that still trains should end, decided from the curves of all trials.

A curve is `[(cost, score), …]` by rising cost, of a trial that trains or has ended. A trial is
never begun anew: one that passes a rung trains on, so no frame is trained twice.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from flowrl.measures import objectives

ScoreCurve = Sequence[tuple[float, float]]
Curves = Mapping[int, ScoreCurve]  # by number of trial
Pruner = Literal["asha", "median", "none"]
_PEERS = 4  # other trials without which the median decides nothing
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


def should_prune(pruner: Pruner, number: int, curves: Curves, rungs: Rungs) -> bool:
    """Return whether trial `number` should end now; its curve and its peers' are in `curves`.

    Nothing is decided before the first rung. A score that is not finite is the worst.
    """
    finite = {
        key: [(cost, score if math.isfinite(score) else -math.inf) for cost, score in curve]
        for key, curve in curves.items()
    }
    own = finite.get(number, [])
    if not own or own[-1][0] < rungs.least:
        return False
    return _PRUNERS[pruner](number, finite, rungs)


def score_at(curve: ScoreCurve, cost: float) -> float | None:
    """Return the newest score up to this cost; None if the curve has not reached it."""
    if not curve or curve[-1][0] < cost:
        return None
    upto = [score for spent, score in curve if spent <= cost]
    return upto[-1] if upto else None


def _asha(number: int, curves: Curves, rungs: Rungs) -> bool:
    """Return whether it is below the best 1/eta of those that reached its newest rung.

    Asynchronous successive halving as Li et al. (2020), in the form that stops trials.
    """
    reached = [cost for cost in rungs.costs() if score_at(curves[number], cost) is not None]
    scores = {key: score_at(curve, reached[-1]) for key, curve in curves.items()}
    known = sorted((score for score in scores.values() if score is not None), reverse=True)
    own = scores[number]
    return own is not None and own < known[math.ceil(len(known) / rungs.eta) - 1]


def _median(number: int, curves: Curves, rungs: Rungs) -> bool:
    """Return whether its best is below the median of what others had at the same cost.

    The rule of Golovin et al. (2017, section 3.2.1), for the newest instead of the mean score.
    """
    cost = curves[number][-1][0]
    others = [score_at(curve, cost) for key, curve in curves.items() if key != number]
    scores = [score for score in others if score is not None]
    best = max(score for _, score in curves[number])
    return len(scores) >= _PEERS and best < statistics.median(scores)


_PRUNERS: Mapping[Pruner, Callable[[int, Curves, Rungs], bool]] = {
    "asha": _asha,
    "median": _median,
    "none": lambda number, curves, rungs: False,
}
