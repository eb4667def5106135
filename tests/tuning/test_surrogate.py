"""Models of score and cost, and proposals that follow them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.stats import norm

from flowrl.tuning import surrogate
from flowrl.tuning.space import Observation, SearchInput, parse_vary

SPACE = parse_vary(["gamma=uniform:0:1", "gae_lambda=uniform:0:1"])


MIXED = parse_vary(["num_steps=choice:16,32,64", "num_envs=pow2:32:256", "gamma=uniform:0:1"])


def history(score, cost=lambda **_: 1.0, *, count=25, seed=0, space=SPACE):
    """Trials at random points."""
    rng = np.random.default_rng(seed)
    points = [space.from_unit(rng.random(len(space.dimensions))) for _ in range(count)]
    return tuple(
        Observation(number=number, point=point, score=score(**point), cost=cost(**point))
        for number, point in enumerate(points)
    )


def given(trials, *, space=SPACE, budget_left=0.5, **more):
    return SearchInput(space=space, history=trials, number=40, budget_left=budget_left, **more)


def mixed(score, **more):
    """Trials in a space with a choice and a power of two."""
    trials = history(score, **more, count=30, seed=3, space=MIXED)
    return given(trials, space=MIXED, budget_left=0.0)


def hill(gamma, gae_lambda):
    return -((gamma - 0.7) ** 2) - (gae_lambda - 0.2) ** 2


def test_a_model_knows_what_it_has_seen_and_doubts_the_rest():
    rng = np.random.default_rng(0)
    points = rng.random((30, 2)) * 0.5
    values = np.sin(4 * points[:, 0])
    model = surrogate.fit(points, values)
    mean, deviation = model.predict(points)
    assert mean == pytest.approx(values, abs=0.02)
    assert model.predict(np.array([[0.9, 0.9]]))[1] > 5 * deviation.max()


def test_noise_is_told_from_the_mean():
    rng = np.random.default_rng(0)
    points = rng.random((150, 1))
    model = surrogate.fit(points, points[:, 0] + 0.1 * rng.normal(size=150))
    mean, deviation = model.predict(np.array([[0.25], [0.75]]))
    assert mean == pytest.approx([0.25, 0.75], abs=0.06)
    assert deviation.max() < 0.06
    assert model.noise == pytest.approx(0.01, rel=0.4)


@pytest.mark.parametrize("values", [np.zeros(5), np.full(5, 7.0)])
def test_equal_values_make_a_flat_model(values):
    model = surrogate.fit(np.linspace(0, 1, 5)[:, None], values)
    mean, deviation = model.predict(np.array([[0.5]]))
    assert mean == pytest.approx(values[:1])
    assert np.isfinite(deviation).all()


def test_log_improvement_is_exact_where_it_can_be_computed_otherwise():
    z = np.linspace(-6, 6, 49)
    plain = np.log(norm.pdf(z) + z * norm.cdf(z))
    found = surrogate.log_improvement(z, np.ones(49), 0.0)
    assert found == pytest.approx(plain, rel=1e-6)
    far = surrogate.log_improvement(-(10.0 ** np.arange(0, 7)), np.ones(7), 0.0)
    assert np.isfinite(far).all()
    assert (np.diff(far) < 0).all()


def test_proposals_come_to_where_the_score_is_high():
    trials = history(hill)
    best = surrogate.ranked(given(trials))[0]
    assert np.linalg.norm(best - [0.7, 0.2]) < 0.25


def test_a_cheap_point_is_preferred_while_the_budget_lasts():
    trials = history(
        lambda gamma, gae_lambda: gae_lambda * (1 - gae_lambda), lambda gamma, **_: 9**gamma
    )
    early, late = (surrogate.ranked(given(trials, budget_left=left))[0] for left in (1.0, 0.0))
    assert early[0] < late[0] + 1e-9
    assert early[0] < 0.3


@pytest.mark.parametrize(("noise", "left"), [(0.05, True), (1e-4, False)])
def test_a_hill_is_left_when_it_is_known_as_well_as_noise_allows(noise, left):
    def predict(points):
        """The top of a hill, known to 0.015; and a place far away, of which nothing is known."""
        return np.array([1.7, 0.4])[: len(points)], np.array([0.015, 0.6])[: len(points)]

    score = SimpleNamespace(predict=predict, noise=noise**2)
    equal = SimpleNamespace(predict=lambda points: (np.zeros(len(points)),) * 2)
    models = surrogate.Models(
        points=np.zeros((1, 2)), scores=np.array([1.7]), score=score, log_cost=equal, success=None
    )
    near, far = surrogate.worth(models, np.zeros((2, 2)), budget_left=0.0)
    assert (far > near) == left


def test_candidates_lie_where_trials_can():
    ranked = surrogate.ranked(mixed(lambda gamma, **_: gamma))
    there = np.array([MIXED.to_unit(MIXED.from_unit(unit)) for unit in ranked[:200]])
    assert ranked[:200] == pytest.approx(there)


def test_a_choice_between_two_others_is_like_neither():
    model = surrogate.fit_models(mixed(lambda num_steps, **_: float(num_steps != 32))).score
    mean, _ = model.predict(np.array([[(level + 0.5) / 3, 0.5, 0.5] for level in range(3)]))
    assert mean == pytest.approx([1, 0, 1], abs=0.1)


def test_a_place_that_fails_is_left_though_the_best_lies_beside_it():
    def score(num_envs, gamma, **_):
        return None if num_envs == 256 else num_envs / 256 - (gamma - 0.5) ** 2

    tried = mixed(score, cost=lambda num_envs, **_: num_envs)
    assert MIXED.from_unit(surrogate.ranked(tried)[0])["num_envs"] == 128


def test_a_failed_trial_is_not_repeated():
    trials = history(lambda gamma, **_: None if gamma > 0.5 else gamma)
    best = surrogate.ranked(given(trials, budget_left=0.0))[0]
    assert best[0] < 0.6


def test_a_trial_that_fails_at_once_is_not_a_cheap_one():
    trials = history(hill, lambda **_: 1e6, count=12)
    corner = {"gamma": 0.05, "gae_lambda": 0.95}
    failed = Observation(number=12, point=corner, score=None, cost=0.0)
    best = surrogate.ranked(given((*trials, failed), budget_left=1.0))[0]
    assert np.linalg.norm(best - SPACE.to_unit(corner)) > 0.5
    assert np.linalg.norm(best - [0.7, 0.2]) < 0.4


def test_a_pending_point_is_not_proposed_again():
    trials = history(hill)
    first = surrogate.ranked(given(trials))[0]
    second = surrogate.ranked(given(trials, pending=(SPACE.from_unit(first),)))[0]
    assert np.linalg.norm(first - second) > 0.01


def test_a_trial_that_was_cut_is_behind_but_not_as_bad_as_its_score_then():
    trials = list(history(hill))
    best = max(trials, key=lambda each: each.score)
    trials[best.number] = replace(best, score=-9.0, cut_at=1000)
    models = surrogate.fit_models(given(tuple(trials)))
    place = SPACE.to_unit(best.point)[None]
    mean, _ = models.score.predict(place)
    whole = [each.score for each in trials if not each.cut_at]
    assert min(whole) < mean[0] < np.median(whole) + 0.05
