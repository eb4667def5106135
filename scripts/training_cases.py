"""What the training benchmarks train: plans of library skills, and a tour of many experts."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp

from flowrl.config import PPOConfig
from flowrl.envs.skill_module import TaskModule, load_module
from flowrl.envs.vector import BatchedEnv
from flowrl.parallel.training_setup import generate_module_with_remapping
from flowrl.paths import RunPaths
from flowrl.ppo import trainer
from flowrl.ppo.loop import Learner
from flowrl.ppo.programs import Programs
from flowrl.ppo.run_io import read_assignment
from flowrl.ppo.sharding import with_shards
from flowrl.runs import PlannedStep, TrainConfig, TrainingRun
from flowrl.skills.graph import SkillGraph
from flowrl.skills.skill import Skill, load_library, parse_skill

LEG = """
name = "{name}"
requirements = {{}}
consumption = {{}}
gain = {{"legs": "n"}}


def task_is_done(closest_blocks):
    return jnp.sum(jnp.abs(closest_blocks[BlockType.TREE.value, :, 0])) {goal}


def task_reward(closest_blocks, closest_blocks_prev):
    before = jnp.sum(jnp.abs(closest_blocks_prev[BlockType.TREE.value, :, 0]))
    now = jnp.sum(jnp.abs(closest_blocks[BlockType.TREE.value, :, 0]))
    return {sign} * 0.05 * (jnp.minimum(now, 8) - jnp.minimum(before, 8))
"""
LEGS = {"Approach Tree": ("<= 2", "-1"), "Leave Tree": (">= 3", "1")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A run that is ready to train, as the trainer's program has it."""

    plan: tuple[PlannedStep, ...]
    config: PPOConfig
    module: TaskModule
    env: BatchedEnv
    programs: Programs
    learner: Learner


def planned(skill: str, config: PPOConfig) -> tuple[PlannedStep, ...]:
    """The plan of a library skill; the experts are numbered as they come."""
    steps = SkillGraph(load_library(config.env_name, None).values()).plan(skill)
    experts = {name: number for number, name in enumerate(dict.fromkeys(s.skill for s in steps))}
    return tuple(PlannedStep(skill=s.skill, count=s.count, expert=experts[s.skill]) for s in steps)


def tour(legs: int) -> tuple[PlannedStep, ...]:
    """To a tree and away from it, and so on, each leg by an expert of its own."""
    names = tuple(LEGS)
    return tuple(PlannedStep(skill=names[leg % 2], count=1, expert=leg) for leg in range(legs))


def opened(plan: Sequence[PlannedStep], config: PPOConfig) -> Opened:
    """The run of a plan, with fresh experts in fresh environments."""
    with tempfile.TemporaryDirectory() as folder:
        run_paths = _run_folder(Path(folder), plan, config)
        config = with_shards(config)
        train_config = TrainConfig(ppo=config, module_path=run_paths.module)
        trainer.use_compile_cache(config.compile_cache)
        module = load_module(run_paths.module)
        env, programs = trainer.open_env(config, module)
        assignment = read_assignment(train_config, module)
        learner, *_ = trainer.prepare(
            trainer.Opened(train_config, module, assignment, env, programs)
        )
    return Opened(
        plan=tuple(plan),
        config=config,
        module=module,
        env=env,
        programs=programs,
        learner=learner,
    )


def spread(task: jax.Array, plan: Sequence[PlannedStep]) -> jax.Array:
    """Where episodes stand in a plan if they begin evenly along it: all experts act at once."""
    return (jnp.arange(task.shape[0]) % len(plan)).astype(task.dtype)


def _run_folder(folder: Path, plan: Sequence[PlannedStep], config: PPOConfig) -> RunPaths:
    last = plan[-1]
    run = TrainingRun(
        run_id="bench",
        skill=last.skill,
        expert=last.expert,
        attempt=1,
        plan=tuple(plan),
        experts=tuple(dict.fromkeys(step.expert for step in plan)),
        ancestors=(),
        config={"env_name": config.env_name},
    )
    run_paths = RunPaths(folder, run.expert)
    run_paths.module.write_text(generate_module_with_remapping(run, _skills(config)))
    return run_paths


def _skills(config: PPOConfig) -> dict[str, Skill]:
    legs = {
        name: parse_skill(LEG.format(name=name, goal=goal, sign=sign), place=name)
        for name, (goal, sign) in LEGS.items()
    }
    return {**load_library(config.env_name, None), **legs}
