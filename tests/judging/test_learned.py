"""Judges that learn from episodes."""

from __future__ import annotations

import numpy as np
import pytest

from flowrl.judging.calibration import auc
from flowrl.judging.judge import SkillText
from flowrl.judging.learned import fit_logistic, summed_up
from tests.judging.making import recording


def test_a_beginning_is_summed_up_causally():
    steps = np.random.default_rng(0).normal(size=(3, 7, 2)).astype(np.float32)
    whole = summed_up(steps)
    for length in range(1, 8):
        np.testing.assert_allclose(summed_up(steps[:, :length])[:, -1], whole[:, length - 1])
    np.testing.assert_allclose(whole[:, -1, 2:4], steps.mean(axis=1), rtol=1e-5)


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
