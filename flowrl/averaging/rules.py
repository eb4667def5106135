"""Rules that make one vector of several members' vectors, in f64; pure functions.

Members are sorted by their content first, so any order of them gives the same bits. A rule bears
as many faulty members as `bears` says: whatever they offer, the result stays near the honest ones.

| rule                | bears of n members           | source                                  |
|---------------------|------------------------------|-----------------------------------------|
| `mean`              | none                         |                                         |
| `trimmed_mean`      | floor(β n), β < 1/2          | Yin et al. 2018, arXiv:1803.01498       |
| `median`            | fewer than n / 2             | the same                                |
| `geometric_median`  | fewer than n / 2             | Pillutla et al. 2019, arXiv:1912.13445  |
| `krum`, `multi_krum`| f, if n ≥ 2 f + 3            | Blanchard et al. 2017, arXiv:1703.02757 |

None of them finds a member that is slightly and cleverly wrong, and each of them costs accuracy
when nobody is faulty. Krum returns one member's vector, and a few that agree with one another can
steer it; the geometric median is the better choice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from flowrl.config import RuleName
from flowrl.errors import ConfigError

_STEPS, _CLOSE = 200, 1e-12  # of Weiszfeld's iteration; its least relative change


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A rule with its parameters.

    Args:
      name: of the rule.
      trimmed: share of the members that `trimmed_mean` leaves out at each end, below 1/2.
      faulty: how many members may be faulty, for `krum` and `multi_krum`.
      kept: how many members `multi_krum` takes the mean of (default: all but the faulty).
    """

    name: RuleName = "mean"
    trimmed: float = 0.2
    faulty: int = 1
    kept: int | None = None

    def bears(self, members: int) -> int:
        """How many of so many members may be faulty."""
        match self.name:
            case "mean":
                return 0
            case "trimmed_mean":
                return int(self.trimmed * members)
            case "median" | "geometric_median":
                return (members - 1) // 2
            case _:
                return self.faulty if members >= 2 * self.faulty + 3 else 0

    def check(self, members: int, *, weighted: bool = False) -> None:
        """Make sure that the rule can be used on so many members.

        Raises:
          ConfigError: it cannot; says how many it needs.
        """
        if members < 1:
            raise ConfigError("there is no member to average; a round needs one at least")
        if not 0 <= self.trimmed < 0.5:
            raise ConfigError(f"trimmed_mean with a share of {self.trimmed:g}: choose 0 to 0.49")
        if self.name not in ("krum", "multi_krum"):
            return
        if weighted:
            raise ConfigError(f"{self.name} takes no weights; choose geometric_median")
        needed = 2 * self.faulty + 3
        if self.faulty < 1 or members < needed:
            raise ConfigError(
                f"{self.name} with {self.faulty} faulty needs {needed} members or more, and 1 "
                f"faulty at least; there are {members} members: choose geometric_median"
            )
        if self.kept is not None and not 1 <= self.kept <= members - self.faulty:
            raise ConfigError(
                f"multi_krum keeps 1 to {members - self.faulty} of {members} members with "
                f"{self.faulty} faulty, not {self.kept}"
            )


def average(rule: Rule, rows: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """One vector f64 `[d]` of the members' `rows` `[n, d]`.

    `weights` `[n]` are numbers from 0, one above 0 at least; without them all count alike.

    Raises:
      ConfigError: too few members for the rule, or weights for one that takes none.
      ValueError: a number is not finite.
    """
    rule.check(len(rows), weighted=weights is not None)
    rows = np.asarray(rows, np.float64)
    weights = np.ones(len(rows)) if weights is None else np.asarray(weights, np.float64)
    if not (np.isfinite(rows).all() and np.isfinite(weights).all()):
        raise ValueError("a member's number is NaN or infinite")
    if weights.min() < 0 or not weights.sum() > 0:
        raise ConfigError("weights must not be below 0, and one of them above 0")
    order = sorted(range(len(rows)), key=lambda i: (rows[i].tobytes(), weights[i]))
    return _RULES[rule.name](rule, rows[order], weights[order] / weights.sum())


def _mean(_: Rule, rows: np.ndarray, shares: np.ndarray) -> np.ndarray:
    return shares @ rows


def _trimmed_mean(rule: Rule, rows: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """The mean of each column without its smallest and greatest numbers."""
    cut = rule.bears(len(rows))
    order = np.argsort(rows, axis=0, kind="stable")[cut : len(rows) - cut]
    kept = shares[order]
    return (np.take_along_axis(rows, order, axis=0) * kept).sum(axis=0) / kept.sum(axis=0)


def _median(_: Rule, rows: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """The weighted median of each column; of two middle numbers, their mean."""
    order = np.argsort(rows, axis=0, kind="stable")
    values = np.take_along_axis(rows, order, axis=0)
    below = np.cumsum(shares[order], axis=0)
    middle = [(below < 0.5 - 1e-12).sum(axis=0), (below <= 0.5 + 1e-12).sum(axis=0)]
    middle = [np.minimum(place, len(rows) - 1)[None] for place in middle]
    return np.mean([np.take_along_axis(values, place, axis=0)[0] for place in middle], axis=0)


def _geometric_median(_: Rule, rows: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """The vector with the least sum of weighted distances, by Weiszfeld's iteration.

    Distances are smoothed by a share of the middle one, so a member that is hit exactly does not
    end the iteration there.
    """
    found = _median(Rule(), rows, shares)
    for _step in range(_STEPS):
        distance = np.linalg.norm(rows - found, axis=1)
        smoothed = np.maximum(distance, 1e-9 * np.median(distance) + np.finfo(float).tiny)
        pull = shares / smoothed
        before, found = found, (pull / pull.sum()) @ rows
        if np.linalg.norm(found - before) <= _CLOSE * np.linalg.norm(found):
            break
    return found


def _krum(rule: Rule, rows: np.ndarray, _: np.ndarray) -> np.ndarray:
    return rows[_by_score(rule, rows)[0]]


def _multi_krum(rule: Rule, rows: np.ndarray, _: np.ndarray) -> np.ndarray:
    kept = rule.kept or len(rows) - rule.faulty
    return rows[np.sort(_by_score(rule, rows)[:kept])].mean(axis=0)


def _by_score(rule: Rule, rows: np.ndarray) -> np.ndarray:
    """The members' numbers, those first whose nearest n - f - 2 others are nearest."""
    distances = np.stack([((rows - row) ** 2).sum(axis=1) for row in rows])
    nearest = np.sort(distances, axis=1)[:, 1 : len(rows) - rule.faulty - 1]
    return np.argsort(nearest.sum(axis=1), kind="stable")


_RULES: dict[str, Callable[[Rule, np.ndarray, np.ndarray], np.ndarray]] = {
    "mean": _mean,
    "trimmed_mean": _trimmed_mean,
    "median": _median,
    "geometric_median": _geometric_median,
    "krum": _krum,
    "multi_krum": _multi_krum,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterStep:
    """The step from the vector of the round before to the members' mean (DiLoCo, arXiv:2311.08105).

    `replace` takes the mean; `sgd` moves towards it by `lr` times the difference and its momentum,
    as Nesterov's method does.
    """

    name: Literal["replace", "sgd"] = "replace"
    lr: float = 0.7
    momentum: float = 0.9

    def apply(
        self, before: np.ndarray, mean: np.ndarray, velocity: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The new vector `[d]` and velocity `[d]`, f64; the first velocity is 0."""
        if self.name == "replace":
            return mean, velocity
        move = mean - before
        velocity = self.momentum * velocity + move
        return before + self.lr * (move + self.momentum * velocity), velocity
