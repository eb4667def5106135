"""Which generated modules a trainer or an evaluation may run: those whose code has verdicts.

A run's verdicts are in its run.json, which was written with the module. A module without run.json
is judged here and now, in a process of its own.
"""

from __future__ import annotations

import ast
from collections.abc import Collection
from pathlib import Path

from flowrl.envs.skill_module import ReadModule, TaskModule, load_module, read_module
from flowrl.errors import SkillError
from flowrl.paths import RunPaths
from flowrl.runs import Verdict, read_run
from flowrl.skills.judging import Limits, Refusal, Subject, verdicts_on
from flowrl.skills.skill import Origin
from flowrl.skills.verdicts import VerdictStore


def open_module(path: Path, limits: Limits | None = None) -> TaskModule:
    """The tasks of a generated module whose functions all have a verdict.

    Raises:
      SkillError: the module departs from the frame, or a step's functions have no verdict.
      GateError: a function asks for something the gate does not admit.
    """
    verdicts = recorded_verdicts(path)
    if verdicts is None:
        load_module(path)  # the gate comes before the trial
        verdicts = _judged(path, limits)
    return load_module(path, verdicts=verdicts)


def recorded_verdicts(path: Path) -> Collection[Verdict] | None:
    """What the run.json beside a module says; None when there is none."""
    if not (path.stem.isascii() and path.stem.isdecimal()):
        return None
    layout = RunPaths(path.parent, int(path.stem))
    if not layout.run_json.exists():
        return None
    return read_run(layout).verdicts


def _judged(path: Path, limits: Limits | None) -> list[Verdict]:
    """Verdicts on all functions of a module, remembered beside it."""
    read, store = read_module(path), VerdictStore(path.parent / "verdicts")
    subjects = _subjects(read)
    found: list[Verdict] = []
    for answer in verdicts_on(subjects, store, limits):
        if isinstance(answer, Refusal):
            raise SkillError(answer.text)
        found.append(answer)
    for subject, verdict in zip(subjects, found, strict=True):
        if store.find(verdict.digest) is None:
            store.keep(verdict, skill=subject.skill)
    return found


def _subjects(read: ReadModule) -> list[Subject]:
    return [
        Subject(
            skill=step["skill"],
            env_name=read.env_name,
            is_done=ast.unparse(done),
            reward=ast.unparse(reward),
            origin=Origin(read.frame.place, done.lineno, reward.lineno),
        )
        for (done, reward), step in zip(read.pairs, read.plan, strict=True)
    ]
