"""Which generated modules may run: the approved ones. Alone because only it reads run folders.

A run's approvals are in its run.json, which was written with the module. Code of a module without a
run.json is tried here and now, in a process of its own.
"""

from __future__ import annotations

import ast
from collections.abc import Collection
from pathlib import Path

from flowrl.envs.skill_module import ReadModule, TaskModule, load_module, read_module
from flowrl.errors import SkillError
from flowrl.paths import RunPaths
from flowrl.runs import CodeApproval, read_run
from flowrl.skills.skill import Origin
from flowrl.skills.validation.cache import ApprovalStore
from flowrl.skills.validation.dry_run import Limits, Refusal, SkillCode, approvals_of


def open_module(path: Path, limits: Limits | None = None) -> TaskModule:
    """The tasks of a generated module whose functions are all approved.

    Raises:
      SkillError: the module departs from the frame, or a step's functions are not approved.
      CodeRefusedError: a function contains something that is not admitted.
    """
    approvals = recorded_approvals(path)
    if approvals is None:
        load_module(path)  # the syntax check comes before the dry run
        approvals = _approved(path, limits)
    return load_module(path, approvals=approvals)


def recorded_approvals(path: Path) -> Collection[CodeApproval] | None:
    """The approvals in the run.json beside a module; None when there is no run.json."""
    if not (path.stem.isascii() and path.stem.isdecimal()):
        return None
    layout = RunPaths(path.parent, int(path.stem))
    return read_run(layout).approvals if layout.run_json.exists() else None


def _approved(path: Path, limits: Limits | None) -> list[CodeApproval]:
    """Approvals of all functions of a module, kept beside it."""
    read, store = read_module(path), ApprovalStore(path.parent / "approvals")
    codes = _codes(read)
    found: list[CodeApproval] = []
    for outcome in approvals_of(codes, store, limits):
        if isinstance(outcome, Refusal):
            raise SkillError(outcome.text)
        found.append(outcome)
    for code, approval in zip(codes, found, strict=True):
        if store.find(approval.digest) is None:
            store.keep(approval, skill=code.skill)
    return found


def _codes(read: ReadModule) -> list[SkillCode]:
    return [
        SkillCode(
            skill=step["skill"],
            env_name=read.game.name,
            is_done=ast.unparse(done),
            reward=ast.unparse(reward),
            origin=Origin(read.place, done.lineno, reward.lineno),
        )
        for (done, reward), step in zip(read.pairs, read.plan, strict=True)
    ]
