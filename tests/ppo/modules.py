"""Run folders with a generated module, for the trainer's tests."""

from __future__ import annotations

import hashlib
from pathlib import Path

from flowrl import runs
from flowrl.envs.skill_module import load_module
from flowrl.paths import RunPaths
from flowrl.runs import CodeApproval, PlannedStep, TrainingRun
from flowrl.skills.validation.cache import ApprovalStore

RELAY_EXPERTS = (3, 5, 9)
RELAY_PLAN = (
    PlannedStep(skill="Go First", count=1, expert=9),
    PlannedStep(skill="Go Second", count=2, expert=3),
)
WALK = (
    PlannedStep(skill="Walk On", count=2, expert=0),
    PlannedStep(skill="Rest", count=1, expert=4),
)
BAKE = (
    PlannedStep(skill="Pick Berry", count=2, expert=0),
    PlannedStep(skill="Bake Pie", count=1, expert=4),
)
CLASSIC = (
    "from craftax.craftax_classic.constants import Achievement, Action, BlockType",
    "GAME = 'Craftax-Classic-Symbolic-v1'",
)
TINY = ("from tiny_engine import Cell", "GAME = 'Tiny-v1'")
DONE = "return inventory.wood >= n"
REWARD = "return inventory_diff.wood * 1.0"


def module_text(plan, experts, *, game=CLASSIC, done: str = DONE, reward: str = REWARD) -> str:
    entries = [{"skill": s.skill, "count": s.count, "expert": s.expert} for s in plan]
    lines = [
        '"""A run."""',
        "import jax",
        "import jax.numpy as jnp",
        *game,
        f"GLOBAL_TO_LOCAL = { {expert: local for local, expert in enumerate(experts)} }",
        f"LOCAL_TO_GLOBAL = {dict(enumerate(experts))}",
        f"PLAN = {entries}",
    ]
    for number, step in enumerate(plan):
        lines += [
            f"def task_{number}_is_done(inventory, n={step.count}):",
            f"    {done}",
            f"def task_{number}_reward(inventory_diff):",
            f"    {reward}",
            f"def task_{number}_network_number():",
            f"    return GLOBAL_TO_LOCAL[{step.expert}]",
        ]
    return "\n".join(lines) + "\n"


def run_folder(folder: Path, plan=RELAY_PLAN, experts=RELAY_EXPERTS, **text) -> RunPaths:
    """A folder that holds the module alone, named after its last expert."""
    folder.mkdir()
    run_paths = RunPaths(folder, experts[-1])
    run_paths.module.write_text(module_text(plan, experts, **text))
    for approval in approved(run_paths):
        ApprovalStore(folder / "approvals").keep(approval)
    return run_paths


def approved(run_paths: RunPaths) -> tuple[CodeApproval, ...]:
    """Approvals of the module's functions, which were not tried."""
    digests = dict.fromkeys(task.digest for task in load_module(run_paths.module).tasks)
    return tuple(CodeApproval(digest=digest) for digest in digests)


def relay_run(run_paths: RunPaths, **changes) -> TrainingRun:
    """run.json for a folder of `run_folder`."""
    facts = {
        "run_id": "e9.a1.0badcafe",
        "skill": "Go Second",
        "expert": 9,
        "attempt": 1,
        "plan": RELAY_PLAN,
        "experts": RELAY_EXPERTS,
        "ancestors": (),
        "config": {},
        "module_sha256": hashlib.sha256(run_paths.module.read_bytes()).hexdigest(),
        "approvals": approved(run_paths),
    }
    run = TrainingRun(**{**facts, **changes})
    runs.write_run(run_paths, run)
    return run
