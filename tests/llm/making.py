"""Answers of a model, told in a line, and the library's skills as answers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flowrl.llm.answers import PLACEHOLDER
from flowrl.runs import CodeApproval
from flowrl.skills.skill import Skill, load_library
from flowrl.skills.validation.cache import ApprovalStore
from flowrl.skills.validation.dry_run import SkillCode
from tests.judging.endpoint import FakeEndpoint

GAME = "Craftax-Classic-Symbolic-v1"
WISH = "Fell trees until there are enough logs"
LIBRARY = load_library(GAME)
WOOD = LIBRARY["Collect Wood"]
STONE = LIBRARY["Collect Stone"]


def amounts(given: dict[str, object]) -> list[dict[str, str]]:
    return [{"item": item, "amount": str(amount)} for item, amount in given.items()]


def contract(name: str = "Fell Trees", *, like: Skill = WOOD, **changes: Any) -> str:
    """A contract as an answer: a new skill with the predicate of one of the library's."""
    told = {
        "name": name,
        "description": "Fell trees for logs.",
        "requirements": [],
        "consumption": [],
        "gain": amounts({"logs": "n"}),
        "ephemeral": [],
        "max_steps": None,
        "training": [],
        "task_is_done": like.is_done,
    }
    return json.dumps({**told, **changes})


def rewards(*codes: str) -> str:
    """Rewards as an answer: by default that of the library."""
    told = [{"idea": f"idea {n}", "task_reward": code} for n, code in enumerate(codes)]
    return json.dumps({"rewards": told or [{"idea": "wood", "task_reward": WOOD.reward}]})


def scripted(endpoint: FakeEndpoint, answers: Sequence[str]) -> FakeEndpoint:
    """The endpoint, which gives one answer after the other, and the last one for ever."""
    rest: Iterator[str] = iter(answers)
    last = [answers[-1]]

    def say(_: str) -> str:
        last[0] = next(rest, last[0])
        return last[0]

    endpoint.say = say
    return endpoint


def approve(root: Path, *likes: Skill) -> None:
    """Keep what the dry run would say of predicates without a reward: it takes seconds each time.

    `test_a_skill_is_written_in_the_form_of_the_librarys` lets it say so.
    """
    for like in likes or (WOOD,):
        code = replace(SkillCode.of(like, GAME), reward=PLACEHOLDER)
        ApprovalStore(root / "approvals").keep(CodeApproval(digest=code.digest, trusted=False))
