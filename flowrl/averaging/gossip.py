"""Means by gossip: in each round agents meet in random pairs, and both take the pair's mean.

No round waits for all agents, and none has a mean of all: the agents come nearer to it, and it
stays where it is but for rounding. A pair's agents get the same bits, others do not.

A matching of all pairs alike averages by a projection W whose expectation has, besides 1, the
eigenvalue 1 - g (g is the *spectral gap*). So the squared distance of the agents to their mean
shrinks by 1 - g in expectation, each round: by 1/2 for an odd number of agents, by a little more
for an even one (Boyd et al. 2006, Randomized gossip algorithms, IEEE Trans. Inf. Theory 52).
"""

from __future__ import annotations

import numpy as np

from flowrl.errors import ConfigError


def matching(members: int, round: int, *, seed: int = 0) -> np.ndarray:
    """The pairs int `[members // 2, 2]` that meet in a round; of an odd number one stays alone."""
    order = np.random.default_rng([seed, round]).permutation(members)
    return order[: members // 2 * 2].reshape(-1, 2)


def spectral_gap(members: int) -> float:
    """The gap g: so much of the squared distance to the mean goes each round, in expectation.

    >>> [spectral_gap(2), spectral_gap(3), spectral_gap(5)]
    [1.0, 0.5, 0.5]
    """
    if members < 2:
        raise ConfigError(f"gossip needs 2 members or more, not {members}")
    return members / 2 / (members - 1 + members % 2)


def gossip_means(rows: np.ndarray, rounds: int, *, first: int = 0, seed: int = 0) -> np.ndarray:
    """The members' rows f64 `[n, d]` after so many rounds, from round `first`.

    Raises:
      ConfigError: there are fewer than two members, or numbers of one are NaN or infinite.
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
