"""What a trainer reads from its run folder and writes there: the run, seeds, finals, checkpoints.

A checkpoint to resume from holds parameters, optimizer, random key and counters; environments start
afresh from the key.
"""

from __future__ import annotations

import logging
import time
from dataclasses import asdict
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flowrl import runs, storage
from flowrl.config import TrainConfig
from flowrl.envs.skill_module import TaskModule
from flowrl.errors import (
    ConfigError,
    ExpertCorruptError,
    ExpertMissingError,
    FileRefusedError,
)
from flowrl.experts import checkpoint
from flowrl.networks.moe import ActorCritic, init_expert
from flowrl.paths import RunPaths
from flowrl.ppo.loop import Counters, Learner, UpdateReport
from flowrl.ppo.update import TrainState
from flowrl.runs import STANDALONE, ExpertReport, PlannedStep, TrainingRun, expert_shapes

logger = logging.getLogger(__name__)


class Assignment(NamedTuple):
    """One run, as its folder and its module say it."""

    paths: RunPaths
    run: TrainingRun


class Resumed(NamedTuple):
    """What outlives a stop; leaves `[E, …]`."""

    train: TrainState
    key: jax.Array
    counters: Counters


def read_assignment(config: TrainConfig, module: TaskModule) -> Assignment:
    """The run in the module's folder; without a run.json, a run of its own.

    Raises:
      ConfigError: the module is not named after an expert.
      FileRefusedError: run.json cannot be read, or says other experts than the module.
    """
    path = config.module_path.absolute()
    if not (path.stem.isascii() and path.stem.isdigit() and path.suffix == ".py"):
        raise ConfigError(f"--module_path {path} must be named after its expert's index, as 2.py")
    paths = RunPaths(path.parent, int(path.stem))
    plan = tuple(
        PlannedStep(
            skill=task.skill,
            count=task.count,
            expert=module.experts[task.expert_local],
            max_steps=task.max_steps,
        )
        for task in module.tasks
    )
    if not paths.run_json.exists():
        run = TrainingRun(
            run_id=STANDALONE,
            skill=plan[-1].skill,
            expert=paths.expert,
            attempt=1,
            plan=plan,
            experts=module.experts,
            ancestors=(),
            config={},
        )
        return Assignment(paths, run)
    run = runs.read_run(paths)
    runs.check_module(paths, run)
    if (run.experts, run.plan) != (module.experts, plan):
        raise FileRefusedError(
            f"{paths.run_json} and {paths.module} say different experts or plans "
            f"({run.experts} and {module.experts}); prepare the run again"
        )
    return Assignment(paths, run)


def initial_experts(
    assignment: Assignment, network: ActorCritic, words: np.ndarray, *, observation_size: int
) -> Any:
    """Stacked parameters, leaves `[E, …]`: the seeds that exist, fresh ones for other experts.

    `words` uint32[E, 2] are random keys for the fresh ones.

    Raises:
      ExpertMissingError: an ancestor's seed is not there.
      ExpertCorruptError: a seed is not the version that run.json names.
      ExpertShapeError: a seed was trained with other sizes.
    """
    like = checkpoint.like_of(
        expert_shapes(observation_size, network.num_actions, network.layer_size)
    )
    digests = {ancestor.index: ancestor.sha256 for ancestor in assignment.run.ancestors}
    params = []
    for local, expert in enumerate(assignment.run.experts):
        folder = assignment.paths.seed(local)
        if folder.is_dir():
            if expert in digests and storage.tree_digest(folder) != digests[expert]:
                raise ExpertCorruptError(f"{folder} is not the version that run.json names; retry")
            params.append(checkpoint.load_expert(folder, like))
        elif expert in digests:
            raise ExpertMissingError(f"{folder}, the seed of expert {expert}, is missing; retry")
        else:
            params.append(init_expert(network, words[local], observation_size=observation_size))
    return jax.tree.map(lambda *leaves: np.stack(leaves), *params)


def save_finals(
    assignment: Assignment, params: Any, *, acted: tuple[int, ...]
) -> tuple[ExpertReport, ...]:
    """Write every expert, then publish all of them by one rename.

    Args:
      assignment: the run.
      params: stacked parameters, leaves `[E, …]`.
      acted: frames of each local expert.
    """
    paths, params = assignment.paths, jax.device_get(params)
    prepared = paths.finals.with_name(f"{paths.finals.name}.tmp")
    for old in (prepared, paths.finals):
        storage.remove_tree(old)
    reports = []
    for local, expert in enumerate(assignment.run.experts):
        one = jax.tree.map(lambda leaf, local=local: leaf[local], params)
        folder = prepared / paths.final(local).name
        checkpoint.save_expert(folder, one)
        reports.append(
            ExpertReport(
                expert=expert,
                acted=acted[local],
                sha256=storage.tree_digest(folder),
                content=checkpoint.array_digest(one),
                shapes=checkpoint.shapes_of(one),
            )
        )
    storage.commit_dir(prepared, paths.finals)
    return tuple(reports)


class Checkpointer:
    """Saves a run every so often, since a trainer that is killed has no time to."""

    def __init__(self, paths: RunPaths, seconds: float) -> None:
        self._paths = paths
        self._seconds = seconds
        self._saved_at = time.monotonic()

    def after(self, update: UpdateReport) -> None:
        """Save if it is time to; if that fails, warn, and let training go on."""
        if not self._seconds or time.monotonic() - self._saved_at < self._seconds:
            return
        try:
            save_checkpoint(self._paths, update.learner, update.counters)
        except (OSError, ValueError) as error:  # Orbax reports a full disk by the latter
            reason = str(error).partition("\n")[0]
            logger.warning("there is no new checkpoint to resume from: %s", reason)
        self._saved_at = time.monotonic()


def save_checkpoint(paths: RunPaths, learner: Learner, counters: Counters) -> None:
    """Write parameters, optimizer state, random key and counters; not the environments."""
    tree = _checkpoint(Resumed(learner.train, learner.groups[0].key, counters))
    checkpoint.save_resume(paths.resume, tree)


def load_checkpoint(paths: RunPaths, train: TrainState) -> Resumed:
    """What the last trainer saved; `train`, leaves `[E, …]`, gives the shapes.

    Raises:
      ExpertError: it is damaged, or of a run with other sizes.
    """
    blank = Counters(acted=(0,) * train.params.first.bias.shape[0])
    like = _checkpoint(Resumed(train, jax.random.key(0), blank))
    found = checkpoint.load_resume(paths.resume, like)
    params = jax.tree.map(jnp.asarray, found["params"])
    moments = map(jnp.asarray, found["opt_state"])
    opt_state = jax.tree.unflatten(jax.tree.structure(train.opt_state), moments)
    counters = Counters(
        updates=int(found["updates"]),
        frames=int(found["frames"]),
        acted=tuple(int(frames) for frames in found["acted"]),
        seconds=float(found["seconds"]),
    )
    key = jax.random.wrap_key_data(found["key"])
    return Resumed(TrainState(params, opt_state), key, counters)


def _checkpoint(kept: Resumed) -> dict[str, Any]:
    counters = {name: np.asarray(value) for name, value in asdict(kept.counters).items()}
    return {
        "params": kept.train.params,
        "opt_state": tuple(jax.tree.leaves(kept.train.opt_state)),
        "key": np.asarray(jax.random.key_data(kept.key)),
        **counters,  # int64 and float64
    }
