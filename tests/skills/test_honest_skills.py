"""Honest functions and files of varied style pass the checks, and so does the library."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flowrl.commands.check import check_files
from flowrl.games.base import COUNT
from flowrl.games.craftax import CLASSIC, FULL
from flowrl.runs import CodeApproval
from flowrl.skills.skill import load_library, parse_skill
from flowrl.skills.validation.cache import shipped
from flowrl.skills.validation.dry_run import SkillCode, try_codes
from tests.skills import honest
from tests.skills.making import IS_DONE, REWARD, skill_text

CODES_OF_LIBRARY = [
    SkillCode.of(skill, game.name)
    for game in (CLASSIC, FULL)
    for skill in load_library(game.name).values()
]
LIBRARY = {code.digest: code for code in CODES_OF_LIBRARY}.values()  # skills may share functions


def code_of(*, is_done: str = IS_DONE, reward: str = REWARD) -> SkillCode:
    """The functions of a file that passes the syntax check."""
    skill = parse_skill(skill_text(is_done, reward), place="skill.py", env_name=CLASSIC.name)
    return SkillCode.of(skill, CLASSIC.name)


def function(name: str, body: str) -> str:
    """A function that asks for the features that its body names."""
    asked = [word for word in (COUNT, *CLASSIC.features) if re.search(rf"\b{word}\b", body)]
    return f"def {name}({', '.join(asked)}):\n" + "\n".join(f"    {li}" for li in body.splitlines())


CODES = {
    **{
        f"reward: {style}": code_of(reward=function("task_reward", body))
        for style, body in honest.REWARDS.items()
    },
    **{
        f"done: {style}": code_of(is_done=function("task_is_done", body))
        for style, body in honest.PREDICATES.items()
    },
}


@pytest.fixture(scope="module")
def outcomes():
    """What becomes of all of them and of the library, in one process."""
    found = try_codes([*CODES.values(), *LIBRARY])
    honest_ones = dict(zip(CODES, found, strict=False))
    return honest_ones, found[len(CODES) :]


@pytest.mark.parametrize("style", CODES)
def test_an_honest_function_passes_all_three_layers(outcomes, style):
    assert isinstance(outcomes[0][style], CodeApproval), outcomes[0][style]


def test_there_are_over_fifty_of_them():
    assert len(CODES) >= 80


def test_the_approvals_that_are_shipped_are_those_of_the_library_today(outcomes):
    """When this fails: `python scripts/write_approvals.py`."""
    assert kept() == outcomes[1]


def test_every_skill_of_the_library_has_a_shipped_approval():
    """Without a dry run; when this fails: `python scripts/write_approvals.py`."""
    assert [code.digest for code in LIBRARY] == [approval.digest for approval in kept()]
    assert not any(approval.trusted for approval in kept())


FILES = Path(__file__).parents[1] / "data" / "honest_skills.txt"
TOLD = {
    "loop_of_blocks": ":7: DANGERS is used by neither function; remove it, or correct its name",
    "cond": ":12: lambda is not admitted in skill code; write a helper function",
}


def test_honest_files_pass_or_are_told_what_to_write_instead(tmp_path):
    """Files as several authors write them: 95 % of them pass as they are."""
    parts = re.split(r"^=== (\w+)\n", FILES.read_text(), flags=re.MULTILINE)[1:]
    for name, text in zip(parts[::2], parts[1::2], strict=True):
        (tmp_path / f"{name}.py").write_text(text)
    checked = check_files(sorted(tmp_path.iterdir()))
    refused = {Path(each.file).stem: each.why for each in checked if each.why is not None}
    assert refused.keys() == TOLD.keys(), refused
    assert all(TOLD[name] in why for name, why in refused.items())
    assert len(refused) <= 0.05 * len(checked)
    assert len(checked) >= 40


def kept() -> list[CodeApproval]:
    return [approval for game in (CLASSIC, FULL) for approval in shipped(game.name).values()]
