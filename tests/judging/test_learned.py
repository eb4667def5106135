"""Judges that learn from episodes."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from flowrl.judging import learned
from flowrl.judging.calibration import auc
from flowrl.judging.judge import RECORDED, SkillText
from flowrl.judging.learned import (
    EpisodeTransformer,
    LearnedJudge,
    better,
    fit_logistic,
    fit_transformer,
)
from tests.judging.making import recording


def test_the_logistic_judge_learns_what_tells_success():
    items, labels = recording(episodes=600).prefixes()
    judge = fit_logistic(items[:400], labels[:400])
    scores = np.array([judge.score(item).score for item in items[400:]])
    assert auc(scores, labels[400:]) > 0.75
    assert judge.version == fit_logistic(items[:400], labels[:400]).version
    assert judge.version != fit_logistic(items[:399], labels[:399]).version


def test_a_learned_judge_abstains_on_a_text():
    items, labels = recording().prefixes()
    assert fit_logistic(items, labels).score(SkillText(skill="Dig", text="{}")).score is None
    assert fit_logistic(items, np.ones(len(items), bool)).score(items[0]).score > 0.9


@pytest.mark.parametrize("spoiled", [1e30, 0.0])
def test_a_feature_that_says_nothing_does_no_harm(spoiled):
    items, labels = recording().prefixes()
    for item in items:
        item.steps[:, 0] = spoiled
    assert np.isfinite(fit_logistic(items, labels).score(items[0]).score)


def far_from_zero(made):
    made.steps[..., 2] = made.steps[:, :1, 2]
    return abs(made.steps[:, 0, 2]) > 0.67


def fourth_above_zero(made):
    return made.steps[:, 3, 2] > 0


@pytest.mark.parametrize(
    ("succeeds", "episodes", "steps"),
    [
        (far_from_zero, 400, 100),
        pytest.param(fourth_above_zero, 2400, 3000, marks=pytest.mark.slow),
    ],
)
def test_the_transformer_finds_what_sums_do_not_show(succeeds, episodes, steps, monkeypatch):
    monkeypatch.setattr(learned, "_STEPS", steps)
    made = recording(episodes=episodes)
    made.success[:] = succeeds(made)
    items, labels = made.prefixes()
    learn, rest = slice(len(items) * 2 // 3), slice(len(items) * 2 // 3, None)
    small = fit_logistic(items[learn], labels[learn])
    large = fit_transformer(items[learn], labels[learn], seed=0)
    found = [
        auc(np.array([judge.score(item).score for item in items[rest]]), labels[rest])
        for judge in (small, large)
    ]
    assert found[1] > found[0] + 0.2, found
    assert better(small, large, items[rest], labels[rest]) is large


@pytest.fixture
def fitted(monkeypatch):
    """Fit a transformer by so many steps; returns the logistic judge that it adds to, and it."""
    bases: list[LearnedJudge] = []

    def kept(items, labels):
        bases.append(fit_logistic(items, labels))
        return bases[-1]

    def fit(items, labels, *, steps: int) -> tuple[LearnedJudge, LearnedJudge]:
        monkeypatch.setattr(learned, "fit_logistic", kept)
        monkeypatch.setattr(learned, "_STEPS", steps)
        large = fit_transformer(items, labels, seed=0)
        return bases[-1], large

    return fit


def test_a_transformer_adds_to_the_odds_of_each_beginning(fitted):
    made = recording(episodes=100)
    made.success[:] = far_from_zero(made)
    base, large = fitted(*made.prefixes(), steps=50)
    steps = np.random.default_rng(0).normal(size=(9, 3)).astype(np.float32)
    added = [large.odds(steps[:seen]) - base.odds(steps[:seen]) for seen in range(1, 10)]
    assert len(set(added)) == 9
    assert 1e-3 < max(map(abs, added)) < 3


def test_what_comes_later_changes_nothing_before():
    model, rng = EpisodeTransformer(), np.random.default_rng(0)
    steps = rng.normal(size=(1, RECORDED, 3)).astype(np.float32)
    params = model.init(jax.random.key(0), steps)
    params = jax.tree.map(lambda leaf: leaf + 0.3 * rng.normal(size=leaf.shape), params)
    later = np.where(np.arange(RECORDED)[:, None] < 9, steps, steps + 5)
    one, other = (np.asarray(model.apply(params, each))[0] for each in (steps, later))
    np.testing.assert_allclose(one[:9], other[:9], rtol=1e-4, atol=1e-5)
    assert abs(one[9:] - other[9:]).max() > 1e-3


def test_the_small_judge_is_taken_where_the_large_one_is_no_better(fitted):
    items, labels = recording(episodes=300).prefixes()
    small, same = fitted(items, labels, steps=0)
    assert same.score(items[0]).score == pytest.approx(small.score(items[0]).score)
    assert better(small, same, items, labels) is small
    assert better(small, same, items, np.ones(len(items), bool)) is small
