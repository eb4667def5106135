"""Figures of judges against hand-made tables."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.games.base import find_game
from flowrl.judging import calibration
from flowrl.judging.calibration import (
    auc,
    brier,
    calibration_error,
    changes,
    interval,
    kappa,
    labelled_texts,
    log_odds,
    measure,
    mutants,
    reliability,
    scaled,
    split,
    temperature_of,
)
from flowrl.judging.judge import Judgement, RuleJudge, SkillText
from flowrl.skills.skill import load_library


def table(a: int, b: int, c: int, d: int) -> tuple[np.ndarray, np.ndarray]:
    """a: both say yes; b: the judge alone; c: the label alone; d: neither."""
    verdicts = np.repeat([1.0, 1.0, 0.0, 0.0], [a, b, c, d])
    return verdicts, np.repeat([True, False, True, False], [a, b, c, d])


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ((20, 5, 10, 15), 0.4),  # agreed 0.7, by chance 0.5
        ((45, 15, 25, 15), 0.1304),
        ((25, 35, 5, 35), 0.2593),
        ((10, 0, 0, 10), 1.0),
        ((0, 10, 10, 0), -1.0),
        ((9, 1, 0, 0), 0.0),  # whoever says yes to all agrees by chance
        ((10, 0, 0, 0), 0.0),
    ],
)
def test_kappa_of_known_tables(counts, expected):
    assert kappa(*table(*counts)) == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize(
    ("scores", "labels", "expected"),
    [
        ([0.1, 0.4, 0.35, 0.8], [0, 0, 1, 1], 0.75),
        ([0.1, 0.2, 0.3, 0.4], [0, 0, 1, 1], 1.0),
        ([0.5, 0.5, 0.5], [0, 1, 1], 0.5),
        ([0.2, 0.5, 0.5, 0.9], [0, 0, 1, 1], 0.875),
    ],
)
def test_auc_counts_pairs_and_ties_half(scores, labels, expected):
    assert auc(np.array(scores), np.array(labels, bool)) == pytest.approx(expected)


def test_brier_is_a_squared_distance():
    assert brier(np.array([1.0, 0.5, 0.0]), np.array([1, 1, 1])) == pytest.approx(1.25 / 3)


def test_the_calibration_error_of_a_table():
    # Ten bins of two: each bin's mean score is 0.05 … 0.95; one of two succeeds in each.
    scores = np.repeat(np.arange(10) / 10 + 0.05, 2)
    labels = np.tile([True, False], 10)
    assert calibration_error(scores, labels) == pytest.approx(0.25)
    assert calibration_error(np.full(20, 0.5), labels) == pytest.approx(0)


@pytest.mark.parametrize("seed", range(5))
def test_no_figure_depends_on_the_order_of_items(seed):
    rng = np.random.default_rng(seed)
    scores, labels = rng.integers(0, 5, 60) / 4, rng.random(60) < 0.4
    rows = rng.permutation(60)
    for figure in (auc, brier, kappa, calibration_error):
        assert figure(scores[rows], labels[rows]) == pytest.approx(figure(scores, labels))


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=60))
def test_bins_hold_every_item_once_from_low_scores_to_high(items):
    scores = np.array([score / 4 for score, _ in items])
    labels = np.array([label for _, label in items], bool)
    bins = reliability(scores, labels)
    assert sum(one.items for one in bins) == len(items)
    assert sum(one.items * one.score for one in bins) == pytest.approx(scores.sum())
    assert sum(one.items * one.positive for one in bins) == pytest.approx(labels.sum())
    assert [one.score for one in bins] == sorted(one.score for one in bins)


@pytest.mark.parametrize("true", [0.5, 2.0, 4.0])
def test_the_temperature_undoes_a_judge_that_is_too_sure(true):
    rng = np.random.default_rng(1)
    odds = rng.normal(size=20_000) * 2
    labels = rng.random(20_000) < 1 / (1 + np.exp(-odds))
    sure = 1 / (1 + np.exp(-odds * true))
    found = temperature_of(sure, labels)
    assert found == pytest.approx(true, rel=0.08)
    before, after = (calibration_error(s, labels) for s in (sure, scaled(sure, found)))
    assert after < 0.02 < before
    assert auc(scaled(sure, found), labels) == pytest.approx(auc(sure, labels), abs=1e-3)


def test_log_odds_of_certainties_are_finite():
    assert np.isfinite(log_odds([0.0, 1.0])).all()
    assert temperature_of(np.array([0.2, 0.9]), np.array([True, True])) == 1.0


def test_intervals_hold_the_truth_about_as_often_as_they_say(monkeypatch):
    monkeypatch.setattr(calibration, "RESAMPLES", 200)
    rng, held = np.random.default_rng(0), 0
    for _ in range(100):
        labels = rng.random(80) < 0.5
        scores = np.clip(rng.normal(size=80) + labels, -9, 9) / 18 + 0.5
        found = interval(auc, scores, labels)
        held += found.low <= 0.7602 <= found.high  # Φ(1/√2)
    assert held >= 86


def test_a_judge_that_is_right_is_trusted_and_one_that_guesses_is_not():
    rng = np.random.default_rng(0)
    labels = rng.random(200) < 0.5
    good = np.where(labels, 0.97, 0.03)
    rule = RuleJudge({})
    asked = np.append(good, [np.nan] * 20), np.append(labels, [True] * 20)
    found = measure(rule, "episode", asked, tuned=asked)
    assert (found.advisory, found.asked, found.answered) == (False, 220, 200)
    guess = measure(rule, "text", (rng.random(200), labels), tuned=(good, labels))
    assert guess.advisory


def test_a_judge_with_too_few_labels_is_advisory():
    few = (np.full(40, 0.9), np.arange(40) > 3)
    found = measure(RuleJudge({}), "text", few, tuned=few)
    assert found.auc is None
    assert found.advisory
    silent = replace(found, answered=1, abstained="it answers prose")
    assert "it abstains, most often for this: it answers prose" in silent.line


def test_the_three_sets_are_apart_and_hold_all():
    items, labels = [SkillText(skill="Dig", text=str(n)) for n in range(41)], np.arange(41) % 3 > 0
    sets = split(items, labels, 3)
    texts = [int(item.text) for part, _ in sets for item in part]
    assert sorted(texts) == list(range(41))
    assert np.array_equal(np.concatenate([known for _, known in sets]), labels[texts])
    assert [len(part) for part, _ in sets] == [20, 11, 10]
    assert [part for part, _ in split(items, labels, 3)] == [part for part, _ in sets]


GAME = find_game("Craftax-Classic-Symbolic-v1")
LIBRARY = load_library(GAME.name)

NIGHTS = {"Spend Night", "Spend Second Night"}  # they count nothing


def test_library_skills_have_three_mutants_with_one_change_each():
    for skill in LIBRARY.values():
        found = mutants(skill, GAME)
        counter = [] if skill.name in NIGHTS else ["another counter"]
        assert list(found) == ["reward turned", *counter, "never done"]
        for kind, one in found.items():
            assert (one.reward == skill.reward) == (kind != "reward turned")
            assert (one.is_done == skill.is_done) == (kind == "reward turned")
            assert one.name == skill.name


def test_mutants_are_what_they_are_called():
    found = mutants(LIBRARY["Collect Drink"], GAME)
    assert "return -(1.0 * achievements_diff" in found["reward turned"].reward
    assert "Achievement.COLLECT_DRINK" not in found["another counter"].is_done
    assert "> 10000" in found["never done"].is_done
    silent = replace(
        LIBRARY["Wake Up"], is_done="def task_is_done(is_sleeping):\n    return is_sleeping"
    )
    assert "is_sleeping > 10000" in mutants(silent, GAME)["never done"].is_done
    assert "another counter" not in mutants(silent, GAME)


def test_texts_are_labelled_by_what_was_done_to_them_and_by_their_runs():
    items, labels = labelled_texts(LIBRARY.values(), GAME, {"Wake Up": False, "Eat Cow": True})
    assert len(items) == 4 * len(LIBRARY) - len(NIGHTS)
    good = [item for item, works in zip(items, labels, strict=True) if works]
    assert good == [SkillText.of(one) for one in LIBRARY.values() if one.name != "Wake Up"]


class ByLength:
    """The longer, the better; the second time it is asked, a little better."""

    name, version = "length", "1"

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def score(self, item: SkillText) -> Judgement:
        again = item.text in self.seen
        self.seen.add(item.text)
        score = min(len(item.text) / 2000 + 0.01 * again, 1.0)
        return Judgement(score=score, why="", judge=self.name, version=self.version)


def test_changes_of_form_are_measured():
    judge = ByLength()
    found = changes(judge, list(LIBRARY.values())[:4], judge.score)
    assert found["again"] == pytest.approx(0.01)
    assert found["reordered"] == pytest.approx(0, abs=1e-3)
    assert found["lengthened"] > found["instructed"] > 0.02
    assert changes(RuleJudge({}), list(LIBRARY.values())[:4]) == {}, "it abstains on texts"


def test_a_judge_that_a_text_can_instruct_is_advisory():
    labels = np.arange(60) < 30
    good = np.where(labels, 0.97, 0.03)
    for moved, advisory in (({"instructed": 0.05}, False), ({"instructed": 0.5}, True), ({}, True)):
        found = measure(RuleJudge({}), "text", (good, labels), tuned=(good, labels), moved=moved)
        assert (found.advisory, found.changes) == (advisory, moved)


def test_a_form_that_few_texts_were_asked_in_is_not_measured():
    class Tired(ByLength):
        def score(self, item: SkillText) -> Judgement:
            found = super().score(item)
            return found if len(self.seen) <= 9 else replace(found, score=None)

    found = changes(Tired(), list(LIBRARY.values())[:4])
    assert found.keys() == {"reordered"}, "one of four is lengthened, and none is instructed"
