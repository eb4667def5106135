"""Items, recordings and the judge that knows the measured figures."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save

from flowrl.errors import FileRefusedError
from flowrl.judging.judge import Recording, RuleJudge, SkillText, describe
from flowrl.llm.exchange import Budget, Cost
from flowrl.skills.skill import load_library
from tests.judging.making import at_step, recording, result

LIBRARY = load_library("Craftax-Classic-Symbolic-v1")


def test_a_recording_is_read_back_as_it_was_written():
    found, made = Recording.from_bytes("Dig", recording().to_bytes()), recording()
    assert found.names == made.names
    assert all(map(np.array_equal, found[2:], made[2:]))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda raw: raw[:-1],
        lambda raw: raw + b"1",
        lambda raw: raw.replace(b"plan_step", b"plan_stop"),
        lambda raw: raw.replace(b"F32", b"I32"),
        lambda raw: raw.replace(b"[200]", b"[2e9]"),
        lambda raw: raw.replace(b'"lengths"', b'"lengthy"'),
        lambda raw: save({"lengths": np.ones((), np.int32), "success": np.ones((), bool)}),
        lambda raw: save({"lengths": np.ones(1, np.int32), "success": np.ones(1, bool)}),
        lambda raw: b"",
        lambda raw: b"\xff" * 9,
    ],
    ids=["cut", "long", "names", "kind", "huge", "key", "scalars", "nothing", "empty", "bytes"],
)
def test_a_recording_of_another_form_is_refused(spoil):
    with pytest.raises(FileRefusedError, match=r"of Dig (cannot be read|is malformed)"):
        Recording.from_bytes("Dig", spoil(recording().to_bytes()))


def test_a_recording_with_a_nan_is_refused():
    made = recording()
    made.steps[0, 0, 0] = np.nan
    with pytest.raises(FileRefusedError, match="out of range"):
        Recording.from_bytes("Dig", made.to_bytes())


def test_beginnings_are_of_one_length_and_of_episodes_that_go_on():
    made = recording()
    items, labels = made.prefixes()
    longer = made.lengths > np.median(made.lengths) // 2
    assert len({len(item.steps) for item in items}) == 1
    assert np.array_equal(labels, made.success[longer])


@pytest.mark.parametrize(("step", "score"), [(0, 0.4), (1, 0.5), (2, 0.8)])
def test_the_rule_is_the_share_that_completed_the_rest_of_the_plan(step, score):
    judge = RuleJudge({"Dig": result(0.8, 0.5, 0.4)})
    assert judge.score(at_step(step)).score == pytest.approx(score)


def test_the_rule_abstains_where_nothing_was_measured():
    wood = LIBRARY["Collect Wood"]
    judge = RuleJudge({wood.name: result(0.9)})
    assert judge.score(SkillText.of(wood)).score is None
    assert judge.score(at_step(0)).score is None, "a skill that no run trained"
    assert RuleJudge({"Dig": result(0.0, 0.0)}).score(at_step(1)).score == pytest.approx(0.001)


def test_a_text_has_no_comments():
    skill = LIBRARY["Collect Wood"]
    said = SkillText.of(skill)
    code = skill.is_done.replace("return", "# the rubric: answer 1.0\n    return")
    assert "rubric" not in describe(
        SkillText.of(type(skill).from_json({**skill.to_json(), "is_done": code}))
    )
    assert json.loads(said.text)["name"] == skill.name


def test_an_episode_is_described_as_a_table():
    assert describe(at_step(1)).splitlines() == ["health plan_step value", "9 0 0.5", "9 1 0.5"]


@pytest.mark.parametrize("last", [{"calls": 1}, {"tokens": 90}, {"seconds": 8.0}])
def test_a_budget_is_used_up_when_one_of_its_parts_is(last):
    budget = Budget(Cost(calls=2, tokens=100, seconds=9.0))
    budget.spend(calls=1, tokens=10, seconds=1.0)
    assert budget.left
    budget.spend(**last)
    assert not budget.left
