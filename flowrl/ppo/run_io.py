"""A trainer's reads and writes in its run folder: the run, seeds, finals, checkpoints.

A checkpoint to resume from holds parameters, optimizer, random key, counters and the best
parameters; environments start afresh from the key.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flowrl import runs, storage
from flowrl.arguments import other_flags
from flowrl.config import PPOConfig, num_shards
from flowrl.envs.skill_module import TaskModule
from flowrl.errors import ConfigError, ExpertCorruptError, ExpertMissingError, FileRefusedError
from flowrl.experts import checkpoint
from flowrl.games.base import ObservationSize
from flowrl.networks.grouped import Packed
from flowrl.networks.moe import ActorCritic, init_expert
from flowrl.paths import RunPaths
from flowrl.ppo.loop import Counters, UpdateReport
from flowrl.ppo.update import TrainState
from flowrl.runs import STANDALONE, ExpertReport, RunResult, TrainConfig, TrainingRun, expert_shapes

logger = logging.getLogger(__name__)
_SHARDING = ("env_shards", "grad_sync_period")


class Assignment(NamedTuple):
    """One run, as its folder and its module say it."""

    run_paths: RunPaths
    run: TrainingRun


class Best(NamedTuple):
    """The parameters after the update with the most success, NumPy arrays with leaves `[E, …]`.

    Only a full window of episodes counts; `update` is 0 before the first one.
    """

    params: Packed
    update: np.ndarray  # int64
    step_success: np.ndarray  # float64[tasks]
    mean_episode_length: np.ndarray  # float64
    acted: np.ndarray  # int64[E]; steps in which each expert had acted by then

    @classmethod
    def none(cls, params: Packed, num_tasks: int, acted: Sequence[int]) -> Best:
        """None yet; `params` gives the shapes."""
        zero = np.zeros((), np.int64)
        return cls(
            jax.tree.map(np.array, params),
            zero,
            np.zeros(num_tasks),
            np.zeros(()),
            np.asarray(acted, np.int64),
        )

    @classmethod
    def of(cls, update: UpdateReport) -> Best:
        """The parameters of this update, copied: the next one donates them."""
        return cls(
            jax.tree.map(np.array, update.learner.train.params),
            np.asarray(update.counters.updates, np.int64),
            np.asarray(update.rates.step_success, np.float64),
            np.asarray(update.rates.mean_episode_length, np.float64),
            np.asarray(update.counters.acted, np.int64),
        )

    def or_better(self, update: UpdateReport) -> Best:
        """This, or the parameters of an update with more success."""
        full, success = update.rates.full, update.rates.success
        return Best.of(update) if full and success > self.success else self

    @property
    def success(self) -> float:
        """The success rate of the last step; below 0 before the first full window."""
        return float(self.step_success[-1]) if self.update else -1.0


class Resumed(NamedTuple):
    """The state that outlives a stop; leaves `[E, …]`."""

    train: TrainState
    key: jax.Array
    counters: Counters
    best: Best


def read_assignment(config: TrainConfig, module: TaskModule) -> Assignment:
    """The run in the module's folder; without a run.json, a run of its own.

    Raises:
      ConfigError: the module is not named after an expert.
      FileRefusedError: run.json cannot be read, or says other experts than the module.
    """
    path = config.module_path.absolute()
    if not (path.stem.isascii() and path.stem.isdigit() and path.suffix == ".py"):
        raise ConfigError(f"--module_path {path} must be named after its expert's index, as 2.py")
    run_paths = RunPaths(path.parent, int(path.stem))
    if not run_paths.run_json.exists():
        run = TrainingRun(
            run_id=STANDALONE,
            skill=module.plan[-1].skill,
            expert=run_paths.expert,
            attempt=1,
            plan=module.plan,
            experts=module.experts,
            ancestors=(),
            config={},
        )
        return Assignment(run_paths, run)
    run = runs.read_run(run_paths)
    runs.check_module(run_paths, run)
    if (run.experts, run.plan) != (module.experts, module.plan):
        raise FileRefusedError(
            f"{run_paths.run_json} and {run_paths.module} say different experts or plans "
            f"({run.experts} and {module.experts}); prepare the run again"
        )
    return Assignment(run_paths, run)


def initial_experts(
    assignment: Assignment,
    network: ActorCritic,
    words: np.ndarray,
    *,
    observation_size: ObservationSize,
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
        folder = assignment.run_paths.seed(local)
        if folder.is_dir():
            if expert in digests and storage.tree_digest(folder) != digests[expert]:
                raise ExpertCorruptError(f"{folder} is not the version that run.json names; retry")
            params.append(checkpoint.load_expert(folder, like))
        elif expert in digests:
            raise ExpertMissingError(f"{folder}, the seed of expert {expert}, is missing; retry")
        else:
            params.append(init_expert(network, words[local], observation_size=observation_size))
    return jax.tree.map(lambda *leaves: np.stack(leaves), *params)


def publish(
    run_paths: RunPaths, experts: Sequence[int], params: Sequence[Any], *, acted: Sequence[int]
) -> tuple[ExpertReport, ...]:
    """Write experts of these numbers as the run's finals, all of them by one rename.

    `params` has a tree of parameters for each, `acted` the frames in which it acted.
    """
    storage.remove_tree(run_paths.finals)
    reports = []
    with storage.building(run_paths.finals) as prepared:
        for local, (expert, one) in enumerate(zip(experts, params, strict=True)):
            folder = prepared / run_paths.final(local).name
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
    return tuple(reports)


def finish(assignment: Assignment, params: Any, counters: Counters, **figures: Any) -> None:
    """Write the final experts, then result.json with their digests.

    `params` have leaves `[E, …]`; `figures` are the other fields of a `RunResult`.
    """
    storage.remove_file(assignment.run_paths.result_json)  # of an earlier run in the same folder
    params, run, acted = jax.device_get(params), assignment.run, counters.acted
    each = [jax.tree.map(itemgetter(local), params) for local in range(len(acted))]
    result = RunResult(
        run_id=run.run_id,
        frames=counters.frames,
        experts=publish(assignment.run_paths, run.experts, each, acted=acted),
        success_rate=figures["step_success"][-1],
        updates=counters.updates,
        wall_seconds=counters.seconds,
        **figures,
    )
    runs.write_result(assignment.run_paths, result)


class Checkpointer:
    """Saves a run every so many seconds, since a trainer that is killed has no time to."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._saved_at = seconds, time.monotonic()

    def due(self, save: Callable[[], None]) -> None:
        """Save if it is time to; if that fails, warn, and let training go on."""
        if not self._seconds or time.monotonic() - self._saved_at < self._seconds:
            return
        try:
            save()
        except (OSError, ValueError) as error:  # Orbax reports a full disk by the latter
            reason = str(error).partition("\n")[0]
            logger.warning("there is no new checkpoint to resume from: %s", reason)
        self._saved_at = time.monotonic()


def save_checkpoint(
    run_paths: RunPaths, config: PPOConfig, update: UpdateReport, best: Best
) -> None:
    """Write parameters, optimizer, random key, counters and the best; not the environments.

    All are whole arrays: nothing says on how many devices they lay.
    """
    learner = update.learner
    train = jax.tree.map(np.asarray, learner.train)
    resumed = Resumed(train, learner.shards[0].key, update.counters, best)
    checkpoint.save_resume(run_paths.resume, _checkpoint(resumed, config))


def load_checkpoint(run_paths: RunPaths, config: PPOConfig, fresh: Resumed) -> Resumed:
    """Return the last trainer's state; `fresh`, leaves `[E, …]`, gives the shapes.

    With another number of shards or period the run goes on with other worlds, and a warning.

    Raises ExpertError if it is damaged, or of a run with other sizes.
    """
    expected = _checkpoint(fresh, config)
    saved = checkpoint.load_resume(run_paths.resume, expected)
    was, now = ({name: int(each[name]) for name in _SHARDING} for each in (saved, expected))
    for said in other_flags(was, now):
        logger.warning("the run was begun with %s: other worlds follow", said)
    params = jax.tree.map(jnp.asarray, saved["params"])
    moments = map(jnp.asarray, saved["opt_state"])
    opt_state = jax.tree.unflatten(jax.tree.structure(fresh.train.opt_state), moments)
    counters = Counters(
        updates=int(saved["updates"]),
        frames=int(saved["frames"]),
        acted=tuple(int(frames) for frames in saved["acted"]),
        seconds=float(saved["seconds"]),
    )
    key = jax.random.wrap_key_data(saved["key"])
    return Resumed(TrainState(params, opt_state), key, counters, saved["best"])


def digest_of(kept: Resumed, config: PPOConfig) -> str:
    """sha256 of all that a run goes on from, as hex."""
    leaves = jax.tree.leaves(_checkpoint(kept, config))
    return checkpoint.array_digest({str(n): np.asarray(leaf) for n, leaf in enumerate(leaves)})


def _checkpoint(kept: Resumed, config: PPOConfig) -> dict[str, Any]:
    counters = {name: np.asarray(value) for name, value in asdict(kept.counters).items()}
    sharding = {"env_shards": num_shards(config), "grad_sync_period": config.grad_sync_period}
    return {
        **{name: np.asarray(value) for name, value in sharding.items()},
        "params": kept.train.params,
        "opt_state": tuple(jax.tree.leaves(kept.train.opt_state)),
        "key": np.asarray(jax.random.key_data(kept.key)),
        "best": kept.best,
        **counters,  # int64 and float64
    }
