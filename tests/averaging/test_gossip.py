"""Agents that average in pairs come nearer to their mean, as fast as the spectral gap says."""

from __future__ import annotations

import numpy as np
import pytest

from flowrl.averaging.gossip import gossip_means, matching, spectral_gap
from flowrl.errors import ConfigError


def rows_of(members: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(members, 3))


def spread(rows: np.ndarray) -> float:
    return float(((rows - rows.mean(axis=0)) ** 2).sum())


@pytest.mark.parametrize("members", [2, 3, 8, 9])
def test_everyone_meets_one_other_at_most(members):
    pairs = matching(members, 5, seed=1)
    assert pairs.shape == (members // 2, 2)
    assert len({*pairs.ravel()}) == members // 2 * 2
    assert np.array_equal(pairs, matching(members, 5, seed=1))


def test_rounds_and_seeds_make_other_pairs():
    pairs = {matching(8, round, seed=seed).tobytes() for round in range(9) for seed in range(9)}
    assert len(pairs) == 81


@pytest.mark.parametrize("members", [2, 3, 4, 7, 10])
def test_the_gap_is_that_of_the_expected_matrix(members):
    """The mean over all permutations has the eigenvalues 1 and 1 - gap."""
    meet = 1 / (members - 1 + members % 2)  # one certain other
    laplacian = meet * (members * np.eye(members) - 1)
    eigenvalues = np.linalg.eigvalsh(np.eye(members) - laplacian / 2)
    np.testing.assert_allclose(eigenvalues[-1], 1)
    np.testing.assert_allclose(eigenvalues[:-1], 1 - spectral_gap(members), atol=1e-12)


@pytest.mark.parametrize("members", [2, 3, 4, 7, 10, 101])
def test_the_measured_contraction_is_the_gaps(members):
    ratios = []
    for seed in range(1500):
        rows = rows_of(members, seed)
        ratios.append(spread(gossip_means(rows, 1, seed=seed)) / spread(rows))
    error = 4 * np.std(ratios) / np.sqrt(len(ratios))
    assert abs(np.mean(ratios) - (1 - spectral_gap(members))) <= error + 1e-12


def test_many_rounds_shrink_within_the_bound():
    begun = rows_of(10)
    after = np.mean([spread(gossip_means(begun, 20, seed=seed)) for seed in range(300)])
    assert after <= 2 * (1 - spectral_gap(10)) ** 20 * spread(begun)


def test_the_mean_stays():
    begun = rows_of(9)
    done = gossip_means(begun, 100)
    np.testing.assert_allclose(done.mean(axis=0), begun.mean(axis=0), atol=1e-14)
    np.testing.assert_allclose(done, np.broadcast_to(begun.mean(axis=0), done.shape), atol=1e-9)


def test_rounds_go_on_where_they_ended():
    begun = rows_of(6)
    twice = gossip_means(gossip_means(begun, 3, seed=2), 4, first=3, seed=2)
    assert twice.tobytes() == gossip_means(begun, 7, seed=2).tobytes()
    assert begun.tobytes() == rows_of(6).tobytes()


def test_a_pair_gets_the_same_bits_and_great_numbers_stay_finite():
    done = gossip_means(np.array([[1.7e308, 0.1], [1.7e308, 0.2]]), 1)
    assert done[0].tobytes() == done[1].tobytes()
    assert np.isfinite(done).all()


@pytest.mark.parametrize("rows", [np.ones((1, 2)), np.ones((0, 2))])
def test_too_few_members_are_refused(rows):
    with pytest.raises(ConfigError, match="2 members or more"):
        gossip_means(rows, 1)


def test_a_member_that_is_not_finite_is_named():
    rows = rows_of(4)
    rows[2, 1] = np.nan
    with pytest.raises(ConfigError, match="member 2 are not finite"):
        gossip_means(rows, 1)
