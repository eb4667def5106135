"""A sequential test, pure, of whether a run still learns by its success.

At every twenty-fourth of a budget, from a third on, a line is fitted to the success in the newest
three fifths of the frames so far. A run is stuck when even the upper end of the line's slope would
raise its success by less than eight points in all frames that are left. Curves that rise late look
like stuck ones before; so the first third of a budget is never judged. The looks are few, and each
asks for the whole budget's gain, so that a run that rises is seldom given up at one of many looks:
`tests/judging/test_convergence.py` counts how seldom.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from itertools import pairwise
from statistics import fmean
from typing import Literal

from flowrl.measures.objectives import Curve

Verdict = Literal["rising", "reached", "stuck"]
_LOOKS = 24  # in a budget
_FIRST_LOOK = 8
_FORGOTTEN = 0.4  # of the frames so far, which the line does not see
_BLOCKS = 10
_ERRORS = 1.0  # standard errors that are added to the slope
_LEAST_GAIN, _LEAST_NEAR_GOAL = 0.08, 0.02  # of success, in all frames that are left


def verdict(curve: Curve, *, budget_frames: int, goal: float) -> Verdict:
    """Return whether a run still rises, has reached its goal, or is stuck below it.

    The verdict changes only at looks, so it may be asked for after every update. The curve's frames
    rise; `budget_frames` is what the run may take, `goal` the success at which it ends by itself.
    """
    if not curve:
        return "rising"
    if curve[-1].success >= goal:
        return "reached"
    look = look_at(curve[-1].frames, budget_frames)
    if look < _FIRST_LOOK:
        return "rising"
    end = look / _LOOKS
    blocks = _blocks(curve, budget_frames * _FORGOTTEN * end, budget_frames * end)
    if not all(blocks):
        return "rising"
    return "stuck" if _is_flat(blocks, end, goal) else "rising"


def learning_progress(curve: Curve) -> float:
    """Return how much success changed lately, in [0, 1]; 1 for a run without a curve.

    It is the change from the third to the last quarter of the frames, also of a success that falls:
    T. Matiisen, A. Oliver, T. Cohen and J. Schulman, "Teacher-student curriculum learning", 2017.
    """
    if not curve:
        return 1.0
    last = curve[-1].frames
    before, now = (
        [point.success for point in curve if low * last < point.frames <= high * last]
        for low, high in ((0.5, 0.75), (0.75, 1.0))
    )
    return abs(fmean(now) - fmean(before or [0.0]))


def look_at(frames: int, budget_frames: int) -> int:
    """Return the number of the newest look after so many frames; verdicts change with it."""
    return min(frames * _LOOKS // budget_frames, _LOOKS - 1)


def _blocks(curve: Curve, begin: float, end: float) -> list[Curve]:
    """The points with frames in (begin, end], in blocks of equally many frames."""
    edges = [begin + (end - begin) * number / _BLOCKS for number in range(_BLOCKS + 1)]
    cuts = [bisect_right(curve, edge, key=lambda point: point.frames) for edge in edges]
    return [curve[low:high] for low, high in pairwise(cuts)]


def _is_flat(blocks: list[Curve], end: float, goal: float) -> bool:
    """Return whether the line through the blocks' means gains too little after `end`, a share."""
    means = [fmean(point.success for point in block) for block in blocks]
    width = end * (1 - _FORGOTTEN) / _BLOCKS  # of a block, as a share of the budget
    places = [(number - (_BLOCKS - 1) / 2) * width for number in range(_BLOCKS)]
    level, spread = fmean(means), math.fsum(place * place for place in places)
    slope = math.fsum(map(float.__mul__, places, means)) / spread
    residuals = math.fsum(
        (mean - level - slope * place) ** 2 for place, mean in zip(places, means, strict=True)
    )
    variance = max(residuals / (_BLOCKS - 2), _variance(blocks, level))
    gain = (slope + _ERRORS * math.sqrt(variance / spread)) * (1 - end)
    return gain < min(_LEAST_GAIN, max(_LEAST_NEAR_GOAL, goal - means[-1]))


def _variance(blocks: list[Curve], level: float) -> float:
    """The variance of a block's mean by the number of its episodes, with Laplace's estimate."""
    points = [point for block in blocks for point in block]
    frames = (points[-1].frames - points[0].frames) * len(points) / max(1, len(points) - 1)
    episodes = max(1.0, frames / max(1.0, fmean(point.episode_length for point in points)))
    share = (level * episodes + 1) / (episodes + 2)
    return share * (1 - share) * _BLOCKS / episodes
