"""Averages of members: their order does not count, and faulty members do not move them far."""

from __future__ import annotations

import numpy as np
import pytest

from flowrl.averaging.rules import OuterStep, Rule, average, gossip_means, matching, spectral_gap
from flowrl.errors import ConfigError

MEMBERS, FAULTY, SIZE = 11, 3, 500
RULES = [
    Rule(),
    Rule(name="trimmed_mean", trimmed=0.3),
    Rule(name="median"),
    Rule(name="geometric_median"),
    Rule(name="krum", faulty=FAULTY),
    Rule(name="multi_krum", faulty=FAULTY),
]
ROBUST = RULES[1:]
FAULTS = {
    "1e30": lambda rows: np.full_like(rows, 1e30),
    "sign flipped": lambda rows: -rows,
    "stale": lambda rows: rows * 0 + 0.1,
}


def rows(seed: int = 0) -> np.ndarray:
    """What honest members offer: one vector, and a small difference of each."""
    random = np.random.default_rng(seed)
    return random.normal(size=SIZE) + 0.1 * random.normal(size=(MEMBERS, SIZE))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_any_order_of_members_gives_the_same_bits(rule):
    offered, weights = rows(), np.random.default_rng(1).random(MEMBERS)
    expected = average(rule, offered)
    for seed in range(20):
        order = np.random.default_rng(seed).permutation(MEMBERS)
        assert np.array_equal(average(rule, offered[order]), expected)
        if rule in RULES[:4]:
            weighted = average(rule, offered[order], weights[order])
            assert np.array_equal(weighted, average(rule, offered, weights))


@pytest.mark.parametrize("rule", RULES[:4], ids=lambda rule: rule.name)
def test_a_member_without_weight_does_not_count(rule):
    offered, weights = rows(), np.zeros(MEMBERS)
    weights[3] = 2.0
    np.testing.assert_allclose(average(rule, offered, weights), offered[3], rtol=1e-12)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("rule", ROBUST, ids=lambda rule: rule.name)
def test_as_many_faulty_members_as_it_bears_do_not_move_it_far(rule, fault):
    assert rule.bears(MEMBERS) >= FAULTY
    offered = rows()
    honest = offered[FAULTY:].copy()
    offered[:FAULTY] = FAULTS[fault](offered[:FAULTY])
    spread = np.linalg.norm(honest - honest.mean(axis=0), axis=1).mean()
    moved = np.linalg.norm(average(rule, offered) - honest.mean(axis=0))
    assert moved <= 3 * spread


def test_the_mean_bears_none():
    offered = rows()
    offered[0] = 1e30
    assert Rule().bears(MEMBERS) == 0
    assert np.linalg.norm(average(Rule(), offered)) > 1e28


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_equal_members_are_their_own_average(rule):
    one = rows()[0]
    np.testing.assert_allclose(average(rule, np.tile(one, (MEMBERS, 1))), one, rtol=1e-12)


def test_the_weighted_mean_is_the_textbooks():
    offered, weights = rows(), np.arange(MEMBERS)
    expected = np.average(offered, axis=0, weights=weights)
    np.testing.assert_allclose(average(Rule(), offered, weights), expected, rtol=1e-12)


@pytest.mark.parametrize("members", [4, 5])
def test_the_median_is_the_textbooks(members):
    offered = rows()[:members]
    found = average(Rule(name="median"), offered)
    np.testing.assert_allclose(found, np.median(offered, axis=0), rtol=1e-12)


def test_the_geometric_median_has_the_least_sum_of_distances():
    offered = rows()

    def cost(point: np.ndarray) -> float:
        return np.linalg.norm(offered - point, axis=1).sum()

    found = average(Rule(name="geometric_median"), offered)
    random = np.random.default_rng(3)
    nearby = [found + 1e-3 * random.normal(size=SIZE) for _ in range(20)]
    assert cost(found) <= min(map(cost, [*nearby, offered.mean(axis=0)]))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_number_that_is_not_finite_is_refused(bad):
    offered = rows()
    offered[2, 5] = bad
    with pytest.raises(ValueError, match="NaN or infinite"):
        average(Rule(name="median"), offered)


@pytest.mark.parametrize(
    ("rule", "members", "message"),
    [
        (Rule(name="krum", faulty=3), 8, "needs 9 members"),
        (Rule(name="krum", faulty=0), 8, "1 faulty at least"),
        (Rule(name="multi_krum", faulty=1, kept=8), 8, "keeps 1 to 7"),
        (Rule(name="trimmed_mean", trimmed=0.5), 8, "0 to 0.49"),
        (Rule(), 0, "no member"),
    ],
)
def test_a_rule_says_how_many_members_it_needs(rule, members, message):
    with pytest.raises(ConfigError, match=message):
        rule.check(members)


@pytest.mark.parametrize(
    ("rule", "weights", "message"),
    [
        (Rule(), -np.ones(MEMBERS), "weights must not be below 0"),
        (Rule(), np.zeros(MEMBERS), "one of them above 0"),
        (Rule(name="krum"), np.ones(MEMBERS), "takes no weights"),
    ],
)
def test_bad_weights_are_refused(rule, weights, message):
    with pytest.raises(ConfigError, match=message):
        average(rule, rows(), weights)


def test_the_outer_step_goes_on_in_the_direction_of_the_steps_before():
    outer, goal = OuterStep(name="sgd", lr=0.7, momentum=0.9), np.ones(4)
    at, velocity = np.zeros(4), np.zeros(4)
    first, velocity = outer.apply(at, goal, velocity)
    np.testing.assert_allclose(first, 0.7 * 1.9)  # the difference, and 0.9 of the new momentum
    still, velocity = outer.apply(first, first, velocity)
    np.testing.assert_allclose(still - first, 0.7 * 0.9 * 0.9)
    assert np.array_equal(OuterStep().apply(at, goal, velocity)[0], goal)


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


@pytest.mark.parametrize("size", [1e-308, 1.0, 1e308])
@pytest.mark.parametrize("rule", RULES[:4], ids=lambda rule: rule.name)
def test_only_the_ratio_of_weights_counts(rule, size):
    offered, weights = rows(), np.random.default_rng(2).random(MEMBERS)
    same = average(rule, offered, weights * size)
    np.testing.assert_allclose(same, average(rule, offered, weights), rtol=1e-6)
