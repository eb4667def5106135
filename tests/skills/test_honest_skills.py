"""Over fifty honest functions of varied style pass all three layers; so does the library."""

from __future__ import annotations

import re

import pytest

from flowrl.runs import Verdict
from flowrl.skills.admitted import INJECTED
from flowrl.skills.games import GAMES
from flowrl.skills.judging import Subject, judge
from flowrl.skills.skill import load_library, parse_skill
from flowrl.skills.verdicts import SHIPPED, shipped
from tests.skills import honest
from tests.skills.making import IS_DONE, REWARD, skill_text

CLASSIC = "Craftax-Classic-Symbolic-v1"
LIBRARY = [
    Subject.of(skill, env_name) for env_name in GAMES for skill in load_library(env_name).values()
]


def subject(*, is_done: str = IS_DONE, reward: str = REWARD) -> Subject:
    """The functions of a file that passes the gate."""
    skill = parse_skill(skill_text(is_done, reward), place="skill.py", env_name=CLASSIC)
    return Subject.of(skill, CLASSIC)


def function(name: str, body: str) -> str:
    """A function that asks for the features that its body names."""
    asked = [word for word in INJECTED if re.search(rf"\b{word}\b", body)]
    return f"def {name}({', '.join(asked)}):\n" + "\n".join(f"    {li}" for li in body.splitlines())


SUBJECTS = {
    **{
        f"reward: {style}": subject(reward=function("task_reward", body))
        for style, body in honest.REWARDS.items()
    },
    **{
        f"done: {style}": subject(is_done=function("task_is_done", body))
        for style, body in honest.PREDICATES.items()
    },
}


@pytest.fixture(scope="module")
def answers():
    """What becomes of all of them and of the library, in one process."""
    found = judge([*SUBJECTS.values(), *LIBRARY])
    honest_ones = dict(zip(SUBJECTS, found, strict=False))
    return honest_ones, found[len(SUBJECTS) :]


@pytest.mark.parametrize("style", SUBJECTS)
def test_an_honest_function_passes_all_three_layers(answers, style):
    assert isinstance(answers[0][style], Verdict), answers[0][style]


def test_there_are_over_fifty_of_them():
    assert len(SUBJECTS) >= 80


def test_the_verdicts_that_are_shipped_are_those_of_the_library_today(answers):
    """When this fails: `python scripts/write_verdicts.py`."""
    assert list(shipped().values()) == answers[1]


def test_every_skill_of_the_library_has_a_shipped_verdict():
    """Without a trial; when this fails: `python scripts/write_verdicts.py`."""
    assert [subject.digest for subject in LIBRARY] == list(shipped()), SHIPPED
    assert not any(verdict.trusted for verdict in shipped().values())
