"""Answers of a model, told in a line, and the library's skills as answers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flowrl.llm.answers import PLACEHOLDER
from flowrl.llm.exchange import Completion, Cost
from flowrl.llm.transcript import Accepted, Begun, Checked, Transcript, read_events
from flowrl.llm.writing import Checks, GivenUpError, Writer
from flowrl.runs import CodeApproval
from flowrl.skills.graph import SkillGraph
from flowrl.skills.skill import Skill, load_library
from flowrl.skills.validation.cache import ApprovalStore
from flowrl.skills.validation.dry_run import SkillCode, unconfined
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


class Asked:
    """A model that gives one answer after the other."""

    def __init__(self, answers: Sequence[str]) -> None:
        self.answers = list(answers)

    def __call__(self, *_: object) -> Completion:
        text = self.answers.pop(0)
        return Completion(text=text, finish="stop", form="json_schema", cost=Cost(1, 1, 0.0))


class Written:
    """Asks for skills by answers, without a command and a network; all checks are the real ones."""

    def __init__(self, root: Path) -> None:
        approve(root)
        self.root = root
        self.checks = Checks(
            graph=SkillGraph(LIBRARY.values()),
            env_name=GAME,
            store=ApprovalStore(root / "approvals"),
            confine=unconfined,
        )

    def __call__(self, answers: Sequence[str], number: int, repairs: int = 0) -> Accepted | None:
        context = json.dumps({"wish": "w", "skills": [], "examples": [], "failed": []})
        told = {"candidates": 8, "repairs": repairs, "context": context}
        begun = Begun(wish="w", env_name=GAME, model="m", **told)
        transcript = Transcript(self.root / f"{number}.jsonl")
        ask = Asked(answers)
        try:
            return Writer(transcript, begun, self.checks, ask=ask, clean=lambda x: x).write()
        except GivenUpError:
            return None

    def refusals(self, number: int) -> list[tuple[str, ...]]:
        """The refusals of each answer."""
        events = read_events(self.root / f"{number}.jsonl")
        return [event.refusals for event in events if isinstance(event, Checked)]
