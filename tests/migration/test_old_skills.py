"""Which of the original's skills become flowrl's, and what becomes of the others."""

from __future__ import annotations

import pytest

from flowrl.skills.judging import Refusal
from tests.migration.old_graphs import REWARD, planned, skill_data, write_books, write_expert

CLASSIC = "Craftax-Classic-Symbolic-v1"


def migrated(old, *skills, **options):
    """The plan for a graph of these skills, each a name and the original's data of it."""
    for index, (name, _) in enumerate(skills):
        write_expert(old, index, name, word=f"n{index}")
    write_books(old, dict(enumerate(skills)))
    return planned(old, **options)


def decisions(plan):
    return [(plan.decision(expert).name, plan.decision(expert).origin) for expert in plan.experts]


def test_a_skill_that_passes_the_gate_keeps_its_own_data(tmp_path):
    plan = migrated(tmp_path, ("Collect Wood", skill_data()))
    assert decisions(plan) == [("Collect Wood", "own")]
    skill = plan.skills.graph.skills["Collect Wood"]
    assert (str(skill.gain["wood"]), "4 * n" in skill.is_done) == ("4*n", True)


def test_a_new_skill_may_need_another_new_one_in_any_order(tmp_path):
    second = skill_data(
        requirements={"achievement:DANCE": "lambda n: 1"}, gain={"joy": {"expression": "n"}}
    )
    first = skill_data(gain={"achievement:DANCE": {"type": "achievement", "expression": 1}})
    plan = migrated(tmp_path, ("Rejoice", second), ("Dance", first))
    assert decisions(plan) == [("Rejoice", "own"), ("Dance", "own")]
    assert plan.skills.graph.needs("Rejoice") == ("Dance",)
    assert str(plan.skills.graph.skills["Dance"].gain["achievement_dance"]) == "1"


def test_ephemeral_gains_stay_ephemeral(tmp_path):
    data = skill_data(gain={"near_tree": {"type": "ephemeral", "expression": "lambda n: 1"}})
    plan = migrated(tmp_path, ("Find Tree", data))
    assert plan.skills.graph.skills["Find Tree"].ephemeral == {"near_tree"}


BAD_CODE = {
    "import": "def task_is_done(inventory, n):\n    import os\n    return inventory.wood > n\n",
    "call": "def task_is_done(inventory, n):\n    return open('x')\n",
    "dunder": "def task_is_done(inventory):\n    return inventory.__class__\n",
    "another game": "def task_is_done(inventory, n):\n    return inventory.torches >= n\n",
    "no function": "task_is_done = 3\n",
    "two functions": "def task_is_done(n):\n    return n\n\ndef f(n):\n    return n\n",
    "more constants": 'def task_is_done(n):\n    return n\n\nname = "Other"\n',
    "not Python": "def task_is_done(",
    "no text": 7,
}


@pytest.mark.parametrize("code", BAD_CODE.values(), ids=BAD_CODE)
def test_code_that_the_gate_refuses_is_not_taken_over(code, tmp_path):
    plan = migrated(
        tmp_path, ("Collect Wood", skill_data(done=code)), ("Odd Skill", skill_data(done=code))
    )
    assert decisions(plan) == [("Collect Wood", "library"), ("Odd Skill", "none")]
    assert all(plan.decision(expert).why for expert in plan.experts)
    assert "Odd Skill" not in plan.skills.graph.skills


BAD_DATA = {
    "nothing": {},
    "a list": [1],
    "no gain": skill_data(gain={}),
    "an amount that calls": skill_data(gain={"wood": "__import__('os').system('x')"}),
    "an amount that is no text": skill_data(gain={"wood": ["n"]}),
    "an endless amount": skill_data(gain={"wood": "n" * 5000}),
    "an item that is no text": skill_data(gain={"": "n"}),
    "too many items": skill_data(requirements={f"x{i}": "1" for i in range(200)}),
    "a need that nothing gains": skill_data(requirements={"unicorn": "1"}, gain={"horn": "1"}),
    "one function": {**skill_data(), "functions": [REWARD]},
    "its own needs": skill_data(requirements={"horn": "1"}, gain={"horn": "1"}),
}


@pytest.mark.parametrize("data", BAD_DATA.values(), ids=BAD_DATA)
def test_data_that_makes_no_skill_is_not_taken_over(data, tmp_path):
    plan = migrated(tmp_path, ("Odd Skill", data))
    assert decisions(plan) == [("Odd Skill", "none")]
    assert plan.decision(plan.experts[0]).why


def test_a_skill_that_would_make_others_impossible_is_not_taken_over(tmp_path):
    plan = migrated(tmp_path, ("Place Table", skill_data(gain={"a_table": "1"})))
    assert decisions(plan) == [("Place Table", "library")]
    assert "the graph cannot be learned with it" in plan.decision(plan.experts[0]).why
    plan.skills.graph.check()


def test_a_name_that_differs_by_its_spaces_alone_is_the_librarys(tmp_path):
    plan = migrated(tmp_path, ("Collect_Wood", {}))
    assert decisions(plan) == [("Collect Wood", "library")]


def test_a_skill_that_the_trial_refuses_is_not_taken_over(tmp_path):
    def refuse(subjects):
        return [Refusal("n01.py:2: it loops; write less") for _ in subjects]

    plan = migrated(tmp_path, ("Odd Skill", skill_data()), trial=refuse)
    assert decisions(plan) == [("Odd Skill", "none")]
    assert plan.decision(plan.experts[0]).why == "n01.py:2: it loops; write less"
    assert plan.skills.verdicts == {}


def test_only_what_is_taken_over_has_a_verdict(tmp_path):
    misfit = skill_data(requirements={"unicorn": "1"}, gain={"horn": "1"})
    plan = migrated(tmp_path, ("Collect Wood", skill_data()), ("Odd Skill", misfit))
    assert set(plan.skills.verdicts) == {"Collect Wood"}
