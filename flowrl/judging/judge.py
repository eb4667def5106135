"""What a judge is: it scores the beginning of an episode, or a skill's text, from 0 to 1.

A judge that cannot say abstains. How far its scores can be trusted is measured on known labels
(`flowrl.judging.calibration`); a score alone never merges, retires or prunes anything.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from flowrl import storage
from flowrl.errors import FileRefusedError, FlowrlError
from flowrl.runs import RunResult
from flowrl.skills.skill import Skill
from flowrl.storage import records
from flowrl.storage.records import Share

RECORDED = 64  # timesteps of an episode that judges may see
PLAN_STEP = "plan_step"  # the feature that says which step of the plan is under way
_LEAST_CHANCE = 1e-3  # a rate of 0 or 1 in few episodes is no certainty


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trajectory:
    """The beginning of an episode; how the episode ended is withheld."""

    skill: str
    names: tuple[str, ...]
    """The features' names."""
    steps: np.ndarray
    """f32[T, features], before each of its first T timesteps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SkillText:
    """A skill as its author wrote it; comments are left out."""

    skill: str
    text: str

    @staticmethod
    def of(skill: Skill, *, reverse: bool = False) -> SkillText:
        """What a judge reads of a skill: JSON with the source of its two functions."""
        amounts = ("requirements", "consumption", "gain")
        content = {
            "name": skill.name,
            "description": skill.description,
            **{key: {k: str(v) for k, v in getattr(skill, key).items()} for key in amounts},
            "task_is_done": ast.unparse(ast.parse(skill.is_done)),
            "task_reward": ast.unparse(ast.parse(skill.reward)),
        }
        parts = dict(reversed(content.items())) if reverse else content
        return SkillText(skill=skill.name, text=json.dumps(parts, indent=1, ensure_ascii=False))


Item = Trajectory | SkillText


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What judgements took, or may take at most."""

    calls: float = 0
    tokens: float = 0
    seconds: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            calls=self.calls + other.calls,
            tokens=self.tokens + other.tokens,
            seconds=self.seconds + other.seconds,
        )

    def within(self, most: Cost) -> bool:
        """Whether nothing of the budget is used up."""
        return self.calls < most.calls and self.tokens < most.tokens and self.seconds < most.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What a judge says of an item: a score in [0, 1], or None if it abstains."""

    score: Share | None
    why: str
    judge: str
    version: str
    cost: Cost = field(default_factory=Cost)


class JudgeUnavailableError(FlowrlError):
    """A judge cannot be asked; the work goes on without it."""


class Judge(Protocol):
    """Scores items; the same version gives the same item the same score, if it can."""

    @property
    def name(self) -> str:
        """The judge's name, as of `--judge`."""
        ...

    @property
    def version(self) -> str:
        """Which model, prompt or data it judges by."""
        ...

    def score(self, item: Item) -> Judgement:
        """Judge one item."""
        ...


@dataclass(frozen=True, slots=True)
class RuleJudge:
    """The measured figures themselves: how often a run's episodes completed the rest of the plan.

    A text that no run was trained on has no figures; the judge abstains.
    """

    results: Mapping[str, RunResult]
    """The result of each skill's run, by the skill's name."""
    texts: Mapping[str, str] = field(default_factory=dict)
    """The text that each run was trained on, by the skill's name."""
    name: str = "rule"
    version: str = "1"

    def score(self, item: Item) -> Judgement:
        """The share of the run's episodes at this step of the plan that completed it."""
        result = self.results.get(item.skill)
        if isinstance(item, SkillText) and self.texts.get(item.skill) != item.text:
            result = None
        if result is None:
            why = f"no run of {item.skill} was measured"
            return Judgement(score=None, why=why, judge=self.name, version=self.version)
        rates = (1.0, *result.step_success)
        step = 0
        if isinstance(item, Trajectory):
            step = int(item.steps[-1, item.names.index(PLAN_STEP)])
        share = rates[-1] / rates[step] if rates[step] else 0.0
        score = min(max(share, _LEAST_CHANCE), 1 - _LEAST_CHANCE)
        why = f"{share:.0%} of the run's episodes that came to step {step + 1} completed the plan"
        return Judgement(score=score, why=why, judge=self.name, version=self.version)


@dataclass(slots=True)
class BudgetedJudge:
    """A judge whose judgements are kept in a folder and cost no more than a budget.

    A judgement is kept under the digest of the judge's version and the item; asked again, it costs
    nothing. When the budget is used up, the judge abstains on what it has not judged before.
    """

    judge: Judge
    budget: Cost
    folder: Path | None
    spent: Cost = field(default_factory=Cost)

    @property
    def name(self) -> str:
        """As of the judge."""
        return self.judge.name

    @property
    def version(self) -> str:
        """As of the judge."""
        return self.judge.version

    def score(self, item: Item) -> Judgement:
        """Judge an item, or find the kept judgement; raises as the judge does."""
        asked = json.dumps([self.name, self.version, type(item).__name__, describe(item)])
        name = hashlib.sha256(asked.encode()).hexdigest()
        path = self.folder / f"{name}.json" if self.folder else None
        if path is not None and path.exists():
            with suppress(FileRefusedError):  # it is asked again
                return replace(records.read(path, Judgement), cost=Cost())
        if not self.spent.within(self.budget):
            why = "the judge's budget is used up; raise --judge_budget"
            return Judgement(score=None, why=why, judge=self.name, version=self.version)
        found = self.judge.score(item)
        self.spent += found.cost
        if path is not None:
            storage.make_dir(path.parent)
            records.write(path, found)
        return found


class Recording(NamedTuple):
    """Episodes of one skill: what judges may see, and the outcomes, which they may not."""

    skill: str
    names: tuple[str, ...]
    steps: np.ndarray
    """f32[N, RECORDED, features], before each timestep; meaningless after the episode's end."""
    lengths: np.ndarray
    """int32[N], timesteps of each episode."""
    success: np.ndarray
    """bool[N], whether the plan was completed."""

    def prefixes(self) -> tuple[list[Trajectory], np.ndarray]:
        """The first half of a usual episode, of each episode that lasts longer, and its outcome.

        All are of one length, half the median: it tells nothing of how an episode ends.
        """
        length = int(min(max(np.median(self.lengths) // 2, 1), RECORDED))
        rows = np.flatnonzero(self.lengths > length)
        items = [
            Trajectory(skill=self.skill, names=self.names, steps=self.steps[row, :length])
            for row in rows
        ]
        return items, self.success[rows]

    def to_bytes(self) -> bytes:
        """A line of JSON, then the arrays; `from_bytes` reads it back."""
        head = {"skill": self.skill, "names": self.names, "episodes": len(self.lengths)}
        arrays = (self.steps.astype("<f4"), self.lengths.astype("<i4"), self.success.astype("u1"))
        return b"\n".join([json.dumps(head).encode(), b"".join(a.tobytes() for a in arrays)])

    @staticmethod
    def from_bytes(skill: str, content: bytes) -> Recording:
        """The recording of a skill that another process has written.

        Raises:
          FileRefusedError: it is not one.
        """
        line, _, data = content.partition(b"\n")
        try:
            head = json.loads(line)
            names, count = tuple(map(str, head["names"])), int(head["episodes"])
            shape = (count, RECORDED, len(names))
            steps_end = 4 * count * RECORDED * len(names)
            end = steps_end + 4 * count
            if head["skill"] != skill or len(data) != end + count or PLAN_STEP not in names:
                raise ValueError("its parts do not fit together")
            steps = np.frombuffer(data[:steps_end], "<f4").reshape(shape)
            lengths = np.frombuffer(data[steps_end:end], "<i4")
            success = np.frombuffer(data[end:], "u1")
            if not np.isfinite(steps).all() or lengths.min() < 1 or success.max() > 1:
                raise ValueError("a number is out of range")
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise FileRefusedError(f"the recording of {skill} is malformed: {error}") from error
        return Recording(skill, names, steps, lengths, success.astype(bool))


def describe(item: Item) -> str:
    """An item as a text for a judge that reads."""
    if isinstance(item, SkillText):
        return item.text
    rows: Sequence[Sequence[float]] = np.round(item.steps.astype(float), 2).tolist()
    return "\n".join([" ".join(item.names), *(" ".join(f"{n:g}" for n in row) for row in rows)])
