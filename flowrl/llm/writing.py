"""Let a model propose a skill: first its contract, then rewards; code decides what is admitted.

An answer goes through the checks, the cheapest first: its form, the gate's syntax check, the facts
of the game, the graph, the dry run in a confined process. Each refusal is one line that goes back
to the model, for so many rounds; then the wish is given up with the last reasons.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from flowrl import storage
from flowrl.config import PPOConfig, with_flags
from flowrl.errors import ConfigError, FileRefusedError, FlowrlError, GraphError, SkillError
from flowrl.games.base import find_game
from flowrl.llm.answers import SCHEMAS, Contract, Rewards, read_answer, skill_text, text_of
from flowrl.llm.context import data_message, system_message
from flowrl.llm.exchange import Completion, Message, tokens_of
from flowrl.llm.transcript import Accepted, Answered, Begun, Checked, Ended, Prompt, Transcript
from flowrl.paths import printable
from flowrl.runs import CodeApproval
from flowrl.skills.graph import SkillGraph
from flowrl.skills.levels import excess
from flowrl.skills.skill import Skill, parse_skill
from flowrl.skills.validation.cache import ApprovalStore
from flowrl.skills.validation.dry_run import Confine, SkillCode, approvals_of

_PLACE = "the skill"
_LINE_LIMIT, _QUOTED_BACK = 400, 8_000  # characters of a refusal, and of an answer sent back
_NONE = "rewards is an empty list; give one at least"
Accept = TypeVar("Accept")
Ask = Callable[[Sequence[Message], str, dict[str, Any]], Completion]


class GivenUpError(FlowrlError):
    """A wish is given up, because no proposal passes the checks; the reasons are a line each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checks:
    """The checks that a proposed skill must pass; with `replaces`, another text of one."""

    graph: SkillGraph
    env_name: str
    store: ApprovalStore
    confine: Confine
    replaces: bool = False
    contradictions: Callable[[Skill], Sequence[str]] = lambda _: ()
    """What the game's own rules say otherwise than a contract."""

    def read(self, text: str) -> Skill:
        """Return the skill in a file's text; an error says why the gate or the graph refuses it."""
        skill = parse_skill(text, place=_PLACE, env_name=self.env_name)
        with_flags(PPOConfig(), **skill.training).check()
        if said := excess(skill, 1, capacity=self.graph.capacity):
            raise SkillError(said)
        if self.replaces:
            self.graph.replacing(skill)
            return skill
        if said := self.contradictions(skill):
            raise SkillError(f"the game says otherwise: {'; '.join(said)}")
        self.graph.plus([skill])
        for other in self.graph.skills.values():
            if (other.gain, other.requirements) == (skill.gain, skill.requirements):
                what = f"{skill.name!r} gains what {other.name!r} gains from the same"
                raise GraphError(f"{what}; gain something new, or need less")
        return skill

    def tried(self, skills: Sequence[Skill]) -> list[CodeApproval | str]:
        """Return an approval of each skill's code, or the reason of the dry run against it."""
        codes = [SkillCode.of(skill, self.env_name) for skill in skills]
        return approvals_of(codes, self.store, confine=self.confine)


class Writer:
    """Writes one skill by questions to a model, all of which its transcript keeps."""

    def __init__(
        self,
        transcript: Transcript,
        begun: Begun,
        checks: Checks,
        *,
        ask: Ask,
        clean: Callable[[str], str],
    ) -> None:
        """Ask by `ask`; `clean` removes from a text what is not to be sent or kept."""
        self._transcript, self._begun, self._checks = transcript, begun, checks
        self._ask, self._clean = ask, clean
        self._data = json.loads(begun.context)
        self._candidates = 0
        self.reached = "no contract yet"

    def write(self) -> Accepted:
        """Return the accepted skill's file; raises GivenUpError with the last reasons."""
        self._transcript.note(self._begun)
        contract, skill = self._until_accepted("contract", self._data, self._contract)
        self.reached = f"the contract of {skill.name!r} is accepted, no reward yet"
        data = {
            "contract": skill_text(contract).partition("def task_reward")[0],
            "examples": self._data["examples"],
        }
        check = partial(self._rewards, file_of=partial(skill_text, contract), fixed=skill)
        return self._until_accepted("rewards", data, check)

    def improve(self, skill: Skill) -> Accepted:
        """Return files of a skill with other rewards; raises as `write`."""
        self._transcript.note(self._begun)
        self.reached = "no reward yet"
        data = {"contract": text_of(skill, "").rstrip(), **self._data}
        check = partial(self._rewards, file_of=partial(text_of, skill), fixed=skill)
        return self._until_accepted("rewards", data, check)

    def _until_accepted(
        self, purpose: Any, data: Any, check: Callable[[Answered], tuple[Accept | None, list[str]]]
    ) -> Accept:
        """Ask until an answer is accepted; each time what was refused is told."""
        game, candidates = find_game(self._begun.env_name), self._begun.candidates
        head = [system_message(purpose, game, candidates=candidates), data_message(data)]
        messages, refusals = head, list[str]()
        for _ in range(self._begun.repairs + 1):
            answer = self._answer(purpose, messages)
            accepted, said = check(answer)
            refusals = [self._line(each) for each in said]
            self._transcript.note(Checked(refusals=tuple(refusals)))
            if accepted is not None:
                return accepted
            said = data_message({"refused": refusals, "remedy": "correct this, answer as before"})
            quoted = answer.text[:_QUOTED_BACK]
            messages = [*head, {"role": "assistant", "content": quoted}, said]
        self._transcript.note(Ended(reasons=tuple(refusals)))
        raise GivenUpError("\n".join(refusals))

    def _answer(self, purpose: Any, messages: Sequence[Message]) -> Answered:
        tokens = sum(tokens_of(each["content"]) for each in messages)
        told = tuple({key: self._clean(value) for key, value in each.items()} for each in messages)
        self._transcript.note(Prompt(purpose=purpose, messages=told, tokens=tokens))
        return self._transcript.answer(lambda: self._ask(told, purpose, SCHEMAS[purpose]))

    def _contract(self, answer: Answered) -> tuple[tuple[Contract, Skill] | None, list[str]]:
        """Return the contract in an answer and its skill without reward, or the refusal."""
        try:
            contract = read_answer(answer, Contract)
            skill = self._checks.read(skill_text(contract))
        except (SkillError, GraphError, ConfigError) as error:
            return None, [str(error)]
        [tried] = self._checks.tried([skill])
        return (None, [tried]) if isinstance(tried, str) else ((contract, skill), [])

    def _rewards(
        self, answer: Answered, file_of: Callable[[str], str], fixed: Skill
    ) -> tuple[Accepted | None, list[str]]:
        """Return the candidates of an answer that pass, and the refusals of the others.

        `file_of` makes the file of a reward, of the skill that is `fixed` but for it.
        """
        try:
            rewards = read_answer(answer, Rewards).rewards[: self._begun.candidates]
        except SkillError as error:
            return None, [str(error)]
        read: dict[str, Skill | str] = {}
        for each in rewards:
            text = self._clean(file_of(each.task_reward))
            self._candidates += 1
            file = f"candidate_{self._candidates}.py"
            storage.make_dir(self._transcript.folder)
            storage.write_atomic(self._transcript.folder / file, text.encode(errors="replace"))
            read[file] = self._with_reward(text, fixed)
        good = {file: skill for file, skill in read.items() if isinstance(skill, Skill)}
        tried = dict(zip(good, self._checks.tried([*good.values()]), strict=True))
        outcomes = {**read, **tried}
        refusals = [f"{file}: {why}" for file, why in outcomes.items() if isinstance(why, str)]
        passed = {}
        for file, approval in outcomes.items():
            if isinstance(approval, CodeApproval):
                self._checks.store.keep(approval)
                passed[file] = _digest(self._transcript.folder / file)
        if not passed:
            return None, refusals or [_NONE]
        first, *others = passed
        rest = {file: passed[file] for file in others}
        accepted = Accepted(skill=fixed.name, file=first, digest=passed[first], others=rest)
        return accepted, refusals

    def _line(self, text: str) -> str:
        """Return a refusal as one line that can be shown."""
        return printable(" ".join(self._clean(text).split()))[:_LINE_LIMIT]

    def _with_reward(self, text: str, fixed: Skill) -> Skill | str:
        """Return a candidate's skill, or the refusal if more than the reward differs."""
        try:
            skill = self._checks.read(text)
        except (SkillError, GraphError, ConfigError) as error:
            return str(error)
        told = replace(skill, reward=fixed.reward, description=fixed.description)
        if told != fixed:
            return "the reward changes the contract; write task_reward and its helpers alone"
        return skill


def accepted_files(transcript: Transcript, accepted: Accepted) -> list[Path]:
    """Return the accepted candidates; FileRefusedError if one was changed since."""
    digests = {accepted.file: accepted.digest, **accepted.others}
    paths = {transcript.folder / file: digest for file, digest in digests.items()}
    for path, digest in paths.items():
        if _digest(path) != digest:
            raise FileRefusedError(f"{path} was edited since it was accepted; ask anew")
    return list(paths)


def _digest(path: Path) -> str:
    return hashlib.sha256(storage.read_bytes(path)).hexdigest()
