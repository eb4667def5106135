"""Judges: they score the beginning of an episode, or a skill's text, from 0 to 1.

A judge that cannot say abstains. How far its scores can be trusted is measured on known labels
(`flowrl.judging.calibration`); a score alone never merges, retires or prunes anything.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from safetensors.numpy import save

from flowrl.errors import FileRefusedError, FlowrlError
from flowrl.llm.exchange import Cost
from flowrl.runs import RunResult
from flowrl.skills.skill import Skill
from flowrl.storage.arrays import read_tensors
from flowrl.storage.records import Share

RECORDED = 64  # timesteps of an episode that judges may see
PLAN_STEP = "plan_step"  # the feature that says which step of the plan is under way
_LEAST_CHANCE = 1e-3  # a rate of 0 or 1 in few episodes is no certainty


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trajectory:
    """The beginning of an episode; how the episode ended is withheld."""

    skill: str
    names: tuple[str, ...]  # the features' names
    steps: np.ndarray  # f32[T, features], before each of its first T timesteps


@dataclass(frozen=True, slots=True, kw_only=True)
class SkillText:
    """A skill as its author wrote it; comments are left out."""

    skill: str
    text: str

    @staticmethod
    def of(skill: Skill, *, reverse: bool = False) -> SkillText:
        """Return the JSON that a judge reads of a skill, with the source of its two functions."""
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
class Judgement:
    """A judge's answer about an item: a score in [0, 1], or None if it abstains."""

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
        """The model, prompt or data that it judges by."""
        ...

    def score(self, item: Item) -> Judgement:
        """Judge one item."""
        ...


def judgement(judge: Judge, score: float | None, why: str, cost: Cost | None = None) -> Judgement:
    """Return this judge's answer about an item."""
    told = {"judge": judge.name, "version": judge.version}
    return Judgement(score=score, why=why, cost=cost or Cost(), **told)


@dataclass(frozen=True, slots=True)
class RuleJudge:
    """The measured figures themselves: how often a run's episodes completed the rest of the plan.

    It abstains on texts: no run says how good a text is that it was not trained on.
    """

    results: Mapping[str, RunResult]  # the result of each skill's run, by the skill's name
    name: str = "rule"
    version: str = "1"

    def score(self, item: Item) -> Judgement:
        """The share of the run's episodes at this step of the plan that completed it."""
        result = self.results.get(item.skill)
        if result is None or not isinstance(item, Trajectory):
            return judgement(self, None, f"no run of {item.skill} was measured")
        rates = (1.0, *result.step_success)
        step = int(item.steps[-1, item.names.index(PLAN_STEP)])
        share = rates[-1] / rates[step] if rates[step] else 0.0
        score = min(max(share, _LEAST_CHANCE), 1 - _LEAST_CHANCE)
        why = f"{share:.0%} of the run's episodes that came to step {step + 1} completed the plan"
        return judgement(self, score, why)


class Recording(NamedTuple):
    """Episodes of one skill: what judges may see, and the outcomes, which they may not."""

    skill: str
    names: tuple[str, ...]
    steps: np.ndarray  # f32[N, RECORDED, features]; meaningless after an episode's end
    lengths: np.ndarray  # int32[N], timesteps of each episode
    success: np.ndarray  # bool[N], whether the plan was completed

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
        """Safetensors: lengths, success, and f32[N, RECORDED] of each feature."""
        steps = {f"step {name}": self.steps[..., n] for n, name in enumerate(self.names)}
        arrays = {"lengths": self.lengths, "success": self.success, **steps}
        return save({name: np.ascontiguousarray(array) for name, array in arrays.items()})

    @staticmethod
    def from_bytes(skill: str, content: bytes) -> Recording:
        """The recording of a skill by another process; FileRefusedError if it is malformed."""
        place = f"the recording of {skill}"
        arrays = read_tensors(content, place=place, remedy="record it again")
        try:
            lengths, success = arrays.pop("lengths"), arrays.pop("success").view("u1")
            steps = np.stack([arrays[name] for name in sorted(arrays)], axis=-1)
            names = tuple(name.removeprefix("step ") for name in sorted(arrays))
            shape, kinds = (len(lengths), RECORDED, len(names)), (steps.dtype, lengths.dtype)
            if (steps.shape, success.shape) != (shape, lengths.shape) or PLAN_STEP not in names:
                raise ValueError("its parts do not fit together")
            if kinds != ("f4", "i4") or not np.isfinite(steps).all() or (lengths < 1).any():
                raise ValueError("a number is out of range")
        except (KeyError, ValueError, TypeError) as error:
            raise FileRefusedError(f"{place} is malformed: {error}; record it again") from error
        return Recording(skill, names, steps, lengths, success > 0)


def describe(item: Item) -> str:
    """An item as a text for a judge that reads."""
    if isinstance(item, SkillText):
        return item.text
    rows: Sequence[Sequence[float]] = np.round(item.steps.astype(float), 2).tolist()
    return "\n".join([" ".join(item.names), *(" ".join(f"{n:g}" for n in row) for row in rows)])
