"""Judges that are put together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from flowrl.judging.calibration import auc
from flowrl.judging.ensemble import EnsembleJudge, fit_ensemble
from flowrl.judging.judge import Item, Judgement, JudgeUnavailableError, SkillText
from flowrl.llm.exchange import Cost


@dataclass
class Says:
    """Gives each item the score that is written under its text."""

    scores: dict[str, float | None]
    name: str = "says"
    version: str = "1"
    gone: bool = False
    asked: int = 0

    def score(self, item: Item) -> Judgement:
        self.asked += 1
        if self.gone:
            raise JudgeUnavailableError("the judge at x cannot be reached")
        score = self.scores[item.text]  # type: ignore[union-attr]
        return Judgement(
            score=score, why="", judge=self.name, version=self.version, cost=Cost(calls=1)
        )


def items(count: int) -> list[SkillText]:
    return [SkillText(skill="Dig", text=str(n)) for n in range(count)]


def made(scores: np.ndarray, name: str) -> Says:
    return Says({str(n): float(score) for n, score in enumerate(scores)}, name)


@pytest.fixture
def known():
    """Two judges that know something each, one that guesses, and the truth."""
    rng = np.random.default_rng(0)
    labels = rng.random(300) < 0.5
    signs = np.where(labels, 1, -1)

    def judge(name: str, skill: float) -> Says:
        odds = skill * signs + rng.normal(size=300)
        return made(1 / (1 + np.exp(-odds)), name)

    return [judge("one", 1.6), judge("two", 1.6), judge("guess", 0.0)], labels


def test_two_that_know_are_better_than_one_and_a_guess_counts_nothing(known):
    members, labels = known
    judge = fit_ensemble(members, items(300), labels)
    assert judge.weights[0] > 0.3
    assert judge.weights[1] > 0.3
    assert judge.weights[2] == 0
    found = [judge.score(item) for item in items(300)]
    rows = [row for row, one in enumerate(found) if one.score is not None]
    scores = np.array([found[row].score for row in rows])
    alone = np.array([members[0].scores[str(row)] for row in rows])
    assert auc(scores, labels[rows]) > auc(alone, labels[rows])
    assert found[0].cost.calls == 2, "a member without a weight is not asked"


def test_members_that_disagree_make_it_abstain():
    pair = [Says({"0": 0.9}, "a"), Says({"0": 0.2}, "b")]
    found = EnsembleJudge(members=pair, weights=[1, 1]).score(items(1)[0])
    assert found.score is None
    assert found.why == "the members disagree: a 0.9, b 0.2"
    pair[1].scores["0"] = 0.6
    assert EnsembleJudge(members=pair, weights=[1, 1]).score(items(1)[0]).score > 0.9


def test_a_member_that_abstains_leaves_the_others():
    pair = [Says({"0": None}, "a"), Says({"0": 0.2}, "b")]
    assert EnsembleJudge(members=pair, weights=[1, 1]).score(items(1)[0]).score == pytest.approx(
        0.2
    )
    assert EnsembleJudge(members=pair[:1], weights=[1]).score(items(1)[0]).score is None


def test_it_goes_on_without_a_member_that_cannot_be_asked(known, caplog):
    members, labels = known
    members[0].gone = True
    judge = fit_ensemble(members, items(300), labels)
    assert judge.weights[0] == 0
    assert judge.score(items(1)[0]).score is not None
    assert members[0].asked == 1
    assert "goes on without it" in caplog.text


def test_only_advice_is_no_judgement(known):
    members, labels = known
    judge = fit_ensemble(members[2:], items(300), labels)
    assert list(judge.weights) == [0]
    found = judge.score(items(1)[0])
    assert (found.score, found.why) == (None, f"all its members are advisory: {members[2].name}")


def test_the_order_of_members_does_not_matter(known):
    members, labels = known
    one, other = (fit_ensemble(order, items(300), labels) for order in (members, members[::-1]))
    np.testing.assert_allclose(one.weights, other.weights[::-1], atol=1e-4)
