"""What a run folder asks of its trainer: the run, its experts and where they start from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from flowrl import checkpoints, runs, storage
from flowrl.config import TrainConfig
from flowrl.envs.skill_module import TaskModule
from flowrl.errors import (
    ConfigError,
    ExpertCorruptError,
    ExpertMissingError,
    FileRefusedError,
    TrainingError,
)
from flowrl.networks.actor_critic import ActorCriticMoE
from flowrl.paths import RunPaths
from flowrl.runs import STANDALONE, ExpertReport, ExpertVersion, PlannedStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """One run, as its folder and its module say it; `experts[local]` is a global index."""

    layout: RunPaths
    run_id: str
    experts: tuple[int, ...]
    plan: tuple[PlannedStep, ...]
    ancestors: tuple[ExpertVersion, ...]
    seed: int


def layout_of(config: TrainConfig) -> RunPaths:
    """The run folder that `--module_path` lies in.

    Raises:
      ConfigError: there is no such file, or it is not named after an expert.
    """
    path = config.module_path.absolute()
    if not path.is_file():
        raise ConfigError(f"--module_path {config.module_path} is not a file")
    if not (path.stem.isascii() and path.stem.isdigit()) or path.suffix != ".py":
        raise ConfigError(
            f"--module_path {config.module_path} must be named after its expert's index, as in 2.py"
        )
    return RunPaths(path.parent, int(path.stem))


def read_assignment(config: TrainConfig, module: TaskModule) -> Assignment:
    """The run in the module's folder; without a run.json, a run of its own.

    Raises:
      FileRefusedError: run.json cannot be read, or says other experts than the module.
    """
    layout = layout_of(config)
    experts = tuple(module.local_to_global[local] for local in range(len(module.local_to_global)))
    plan = tuple(
        PlannedStep(
            skill=task.skill,
            count=task.count,
            expert=experts[task.expert_local],
            max_steps=task.max_steps,
        )
        for task in module.tasks
    )
    if not layout.run_json.exists():
        return Assignment(
            layout=layout,
            run_id=STANDALONE,
            experts=experts,
            plan=plan,
            ancestors=(),
            seed=config.seed,
        )
    run = runs.read_run(layout)
    runs.check_module(layout, run)
    if (run.experts, run.plan) != (experts, plan):
        raise FileRefusedError(
            f"{layout.run_json} and {layout.module} say different experts or plans "
            f"({run.experts} and {experts}); prepare the run again"
        )
    return Assignment(
        layout=layout,
        run_id=run.run_id,
        experts=experts,
        plan=plan,
        ancestors=run.ancestors,
        seed=config.seed + run.attempt - 1,
    )


def initial_experts(assignment: Assignment, body: ActorCriticMoE, words: np.ndarray) -> Any:
    """Stacked parameters: the seeds of the experts that have one, fresh ones for the others.

    `words` uint32[E, 2] are random keys for the fresh ones.

    Raises:
      ExpertMissingError: an ancestor's seed is not there.
      ExpertCorruptError: a seed is not the version that run.json names.
      ExpertShapeError: a seed was trained with other sizes.
    """
    like = checkpoints.like_of(body.expert_shapes)
    digests = {ancestor.index: ancestor.sha256 for ancestor in assignment.ancestors}
    params = []
    for local, expert in enumerate(assignment.experts):
        folder = assignment.layout.seed(local)
        if folder.is_dir():
            _check_seed(folder, digests.get(expert))
            params.append(checkpoints.load_expert(folder, like))
        elif expert in digests:
            raise ExpertMissingError(f"{folder}, the seed of expert {expert}, is missing; retry")
        else:
            params.append(body.init_expert(words[local]))
    return jax.tree.map(lambda *leaves: np.stack(leaves), *params)


def save_finals(
    assignment: Assignment, params: Any, *, acted: tuple[int, ...]
) -> tuple[ExpertReport, ...]:
    """Write every expert, then publish all of them at one stroke.

    Args:
      assignment: the run.
      params: stacked parameters, leaves `[E, …]`.
      acted: frames of each local expert.

    Raises:
      TrainingError: a parameter is not finite; nothing is written.
    """
    layout, params = assignment.layout, jax.device_get(params)
    finite = all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))
    if not finite:
        raise TrainingError(f"{layout.folder}: trained parameters are not finite; lower --lr")
    prepared = layout.finals.with_name(f"{layout.finals.name}.tmp")
    for old in (prepared, layout.finals):
        storage.remove_tree(old)
    reports = []
    for local, expert in enumerate(assignment.experts):
        one = jax.tree.map(lambda leaf, local=local: leaf[local], params)
        folder = prepared / layout.final(local).name
        checkpoints.save_expert(folder, one)
        reports.append(
            ExpertReport(
                expert=expert,
                acted=acted[local],
                sha256=storage.tree_digest(folder),
                content=checkpoints.array_digest(one),
                shapes=checkpoints.shapes_of(one),
            )
        )
    storage.commit_dir(prepared, layout.finals)
    return tuple(reports)


def _check_seed(folder: Any, wanted: str | None) -> None:
    if wanted is not None and storage.tree_digest(folder) != wanted:
        raise ExpertCorruptError(f"{folder} is not the version that run.json names; retry")
