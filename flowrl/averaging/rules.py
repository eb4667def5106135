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

from dataclasses import dataclass
from typing import Literal

import numpy as np

from flowrl.config import RuleName
from flowrl.errors import ConfigError

Vector = np.ndarray  # f64 `[d]`
_STEPS, _CLOSE = 200, 1e-12  # of Weiszfeld's iteration; its least relative change


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A rule with its parameters."""

    name: RuleName = "mean"
    trimmed: float = 0.2  # share that `trimmed_mean` leaves out at each end, below 1/2
    faulty: int = 1  # members that may be faulty, for `krum` and `multi_krum`
    kept: int | None = None  # members of `multi_krum`'s mean (default: all but the faulty)

    def bears(self, members: int) -> int:
        """Return the number of members that may be faulty, of so many."""
        if "krum" in self.name:
            return self.faulty if members >= 2 * self.faulty + 3 else 0
        fewest = {"mean": 0, "trimmed_mean": int(self.trimmed * members)}
        return fewest.get(self.name, (members - 1) // 2)

    def check(self, members: int, *, weighted: bool = False) -> None:
        """Raise ConfigError, which says how many it needs, if it cannot be used on so many."""
        krum, most = "krum" in self.name, members - self.faulty
        if members < 1:
            raise ConfigError("there is no member to average; a round needs one at least")
        if not 0 <= self.trimmed < 0.5:
            raise ConfigError(f"trimmed_mean with a share of {self.trimmed:g}: choose 0 to 0.49")
        if krum and weighted:
            raise ConfigError(f"{self.name} takes no weights; choose geometric_median")
        if krum and not 1 <= self.faulty <= self.bears(members):
            raise ConfigError(
                f"{self.name} with {self.faulty} faulty needs {2 * self.faulty + 3} members, and 1 "
                f"faulty at least; there are {members} members: choose geometric_median"
            )
        if krum and self.kept is not None and not 1 <= self.kept <= most:
            raise ConfigError(f"multi_krum keeps 1 to {most} of {members} members, not {self.kept}")


def average(rule: Rule, rows: np.ndarray, weights: np.ndarray | None = None) -> Vector:
    """One vector of the members' `rows` `[n, d]`.

    `weights` `[n]` are numbers from 0, one above 0 at least; without them all count alike. Raises
    ConfigError as `Rule.check`, and ValueError if a number is not finite.
    """
    rule.check(len(rows), weighted=weights is not None)
    rows = np.asarray(rows, np.float64)
    weights = np.ones(len(rows)) if weights is None else np.asarray(weights, np.float64)
    if not (np.isfinite(rows).all() and np.isfinite(weights).all()):
        raise ValueError("a member's number is NaN or infinite")
    if weights.min() < 0 or not weights.any():
        raise ConfigError("weights must not be below 0, and one of them above 0")
    order = sorted(np.flatnonzero(weights), key=lambda i: (rows[i].tobytes(), weights[i]))
    shares = weights[order] / weights.max()  # large numbers would have an infinite sum
    rows, shares = rows[order], shares / shares.sum()
    match rule.name:
        case "mean":
            return shares @ rows
        case "trimmed_mean":
            cut = slice(rule.bears(len(rows)), len(rows) - rule.bears(len(rows)))
            values, shares = (each[cut] for each in _by_column(rows, shares))
            return (values * shares).sum(axis=0) / shares.sum(axis=0)
        case "median":
            return _median(rows, shares)
        case "geometric_median":
            return _geometric_median(rows, shares)
    return _krum(rule, rows)


def _by_column(rows: np.ndarray, shares: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of each column in their order, and their members' shares, both `[n, d]`."""
    order = np.argsort(rows, axis=0, kind="stable")
    return np.take_along_axis(rows, order, axis=0), shares[order]


def _median(rows: np.ndarray, shares: np.ndarray) -> Vector:
    """The weighted median of each column; of two middle numbers, their mean."""
    values, shares = _by_column(rows, shares)
    below = np.cumsum(shares, axis=0)
    middle = [(below < 0.5 - 1e-12).sum(axis=0), (below <= 0.5 + 1e-12).sum(axis=0)]
    places = np.minimum(middle, len(rows) - 1)
    return np.take_along_axis(values, places, axis=0).mean(axis=0)


def _geometric_median(rows: np.ndarray, shares: np.ndarray) -> Vector:
    """The vector with the least sum of weighted distances, by Weiszfeld's iteration.

    Distances are smoothed by a share of the middle one, so a member that is hit exactly does not
    end the iteration there.
    """
    point = _median(rows, shares)
    for _ in range(_STEPS):
        distance = np.linalg.norm(rows - point, axis=1)
        smoothed = np.maximum(distance, 1e-9 * np.median(distance) + np.finfo(float).tiny)
        pull = shares / smoothed
        before, point = point, (pull / pull.sum()) @ rows
        if np.linalg.norm(point - before) <= _CLOSE * np.linalg.norm(point):
            break
    return point


def _krum(rule: Rule, rows: np.ndarray) -> Vector:
    """The mean of the rows, or `krum`'s one, whose nearest n - f - 2 others are nearest."""
    distances = np.stack([((rows - row) ** 2).sum(axis=1) for row in rows])
    nearest = np.sort(distances, axis=1)[:, 1 : len(rows) - rule.faulty - 1]
    kept = 1 if rule.name == "krum" else rule.kept or len(rows) - rule.faulty
    best = np.argsort(nearest.sum(axis=1), kind="stable")[:kept]
    return rows[np.sort(best)].mean(axis=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterStep:
    """The step from the vector of the round before to the members' mean (DiLoCo, arXiv:2311.08105).

    `replace` takes the mean; `sgd` moves towards it by `lr` times the difference and its momentum,
    as Nesterov's method does.
    """

    name: Literal["replace", "sgd"] = "replace"
    lr: float = 0.7
    momentum: float = 0.9

    def apply(self, before: Vector, mean: Vector, velocity: Vector) -> tuple[Vector, Vector]:
        """The new vector and velocity; the first velocity is 0."""
        if self.name == "replace":
            return mean, velocity
        move = mean - before
        velocity = self.momentum * velocity + move
        return before + self.lr * (move + self.momentum * velocity), velocity


# Gossip: in each round agents meet in random pairs, and both take the pair's mean


def matching(members: int, round: int, *, seed: int = 0) -> np.ndarray:
    """The pairs int `[members // 2, 2]` that meet in a round; of an odd number one stays alone."""
    order = np.random.default_rng([seed, round]).permutation(members)
    return order[: members // 2 * 2].reshape(-1, 2)


def spectral_gap(members: int) -> float:
    """The gap g: so much of the squared distance to the mean goes each round, in expectation.

    A matching of all pairs alike averages by a projection whose expectation has, besides 1, the
    eigenvalue 1 - g (Boyd et al. 2006, Randomized gossip algorithms, IEEE Trans. Inf. Theory 52).

    >>> [spectral_gap(2), spectral_gap(3), spectral_gap(5)]
    [1.0, 0.5, 0.5]
    """
    if members < 2:
        raise ConfigError(f"gossip needs 2 members or more, not {members}")
    return members / 2 / (members - 1 + members % 2)


def gossip_means(rows: np.ndarray, rounds: int, *, first: int = 0, seed: int = 0) -> np.ndarray:
    """The members' rows f64 `[n, d]` after so many rounds, from round `first`.

    No round waits for all agents, and none has a mean of all: the agents come nearer to it, and it
    stays where it is but for rounding. A pair's agents get the same bits, others do not. Raises
    ConfigError for fewer than two members, or numbers that are not finite.
    """
    rows = np.array(rows, np.float64)
    spectral_gap(len(rows))  # which refuses a single member
    bad = np.flatnonzero(~np.isfinite(rows).all(axis=1))
    if bad.size:
        raise ConfigError(f"weights of member {bad[0]} are not finite; leave it out")
    for round in range(first, first + rounds):
        one, other = matching(len(rows), round, seed=seed).T
        rows[one] = rows[other] = rows[one] / 2 + rows[other] / 2
    return rows
