"""How sure a share is that was counted."""

from __future__ import annotations

import math

_Z95 = 1.959963984540054  # the normal quantile of a two-sided 95 % interval
_LEAST_PAIRS = 10


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """The 95 % score interval of a share, without continuity correction.

    E. B. Wilson, "Probable inference, the law of succession, and statistical inference", Journal
    of the American Statistical Association 22 (1927), 209-212.

    >>> low, high = wilson(8, 10)
    >>> round(low, 3), round(high, 3)
    (0.49, 0.943)
    """
    share, z2 = successes / trials, _Z95**2
    middle = share + z2 / (2 * trials)
    spread = _Z95 * math.sqrt(share * (1 - share) / trials + z2 / (4 * trials**2))
    scale = 1 + z2 / trials
    return max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)


def more_often(wins: int, losses: int) -> bool:
    """Whether wins outnumber losses by more than chance: the share's lower bound is over a half.

    For pairs of outcomes this is the test of Q. McNemar, "Note on the sampling error of the
    difference between correlated proportions or percentages", Psychometrika 12 (1947), 153-157,
    since Wilson's interval holds just the shares that the score test does not reject. Both rest on
    the normal distribution, so fewer than ten pairs that differ say nothing here.

    >>> more_often(9, 1), more_often(6, 4), more_often(4, 0)
    (True, False, False)
    """
    pairs = wins + losses
    return pairs >= _LEAST_PAIRS and wilson(wins, pairs)[0] > 0.5
