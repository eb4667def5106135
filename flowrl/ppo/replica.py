"""One replica of a run: trains from round to round on what all replicas have learned.

What it holds at the beginning of a round is a function of that round: the round's mean, and the
environments and episodes that it left with its own offer. So one that is killed learns the same
once more.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flowrl import runs, storage
from flowrl.averaging.replicas import num_rounds
from flowrl.averaging.rounds import Figures, Offer, Round, Rounds, pooled
from flowrl.config import TrainConfig
from flowrl.envs.skill_module import open_module
from flowrl.envs.tasks import check_gains
from flowrl.errors import FileRefusedError, FlowrlError
from flowrl.paths import RunPaths
from flowrl.ppo import run_io
from flowrl.ppo.loop import Counters, Learner, UpdateReport, frames_per_update, train
from flowrl.ppo.metrics import EpisodeLog
from flowrl.ppo.progress import Reporter
from flowrl.ppo.rollout import RolloutState
from flowrl.ppo.sharding import COPIED, verify_distributed_setup
from flowrl.ppo.trainer import Opened, open_env, prepare, use_compile_cache
from flowrl.ppo.update import TrainState
from flowrl.runs import RunResult

_LOOK_SECONDS = 0.02
_NEVER = 2.0  # a share of success: the averager ends the run, for all replicas at once
_SEEN = "episodes"  # prefix of the names of an EpisodeLog's arrays


def run(config: TrainConfig) -> int:
    """Train as the replica of this number, until the run ends; replica 0 writes its results.

    Returns:
      The exit code.

    Raises:
      FlowrlError: the run cannot be trained; the replica's folder says why.
    """
    number = config.replica or 0
    own = RunPaths(config.module_path.absolute().parent, 0).replica(number)
    storage.make_dir(own.folder)
    storage.remove_file(own.last_words)
    ppo = config.ppo
    if number:
        logging.getLogger("flowrl").setLevel(logging.WARNING)  # replica 0 reports
        ppo = replace(ppo, use_wandb=False, use_tensorboard=False)
    use_compile_cache(ppo.compile_cache)
    try:
        module = open_module(config.module_path)
        assignment = run_io.read_assignment(config, module)
        config = replace(config, ppo=verify_distributed_setup(ppo).config, resume=False)
        opened = Opened(module, assignment, *open_env(config.ppo, module))
        with closing(Replica(config, opened)) as replica:
            return replica.train()
    except FlowrlError as error:
        storage.write_atomic(own.last_words, str(error))
        raise


class Replica:
    """A replica and the rounds of its run."""

    def __init__(self, config: TrainConfig, opened: Opened) -> None:
        assignment = opened.assignment
        self._opened, self._number = opened, config.replica or 0
        self._every = config.ppo.average_every
        steps = num_rounds(config.ppo) * self._every * frames_per_update(config.ppo)
        self._ppo = replace(config.ppo, total_timesteps=steps, success_state_rate=_NEVER)
        self._rounds = Rounds(assignment.paths.rounds)
        own = assignment.paths.replica(self._number)
        logged = assignment._replace(paths=own) if self._number else assignment
        self._reporter = Reporter(logged, self._ppo, own)
        self._fresh, _, _ = prepare(assignment, config, opened.env, opened.programs)

    def train(self) -> int:
        """Train from the newest round until the last; returns the exit code."""
        env, programs = self._opened.env, self._opened.programs
        if not self._number and self._rounds.newest() is None:
            first = Round(number=0, acted=(0,) * env.num_experts)
            self._rounds.commit(first, named(self._fresh.train))
        base, episodes = self._wait_for(0), EpisodeLog(self._ppo.num_envs, env.num_tasks)
        kept = self._rounds.state(base.number, self._number)
        shards = restored(kept, self._fresh.shards, episodes)
        learner, counters = self._begun(base, shards)
        self._reporter.begin_training(counters)
        reports = train(
            env, self._ppo, programs, learner=learner, counters=counters, episodes=episodes
        )
        update = next(reports)
        while not base.ended:
            self._reporter.report(update)
            check_gains(self._opened.module.tasks, update.claims, ended=update.ended)
            if update.counters.updates % self._every:
                update = next(reports)
                continue
            self._offer(base, update)
            base = self._wait_for(base.number + 1)
            if not base.ended:
                update = reports.send(self._begun(base, update.learner.shards))
        if not self._number:
            self._finish(base)
        return 0

    def close(self) -> None:
        """Close the trackers."""
        self._reporter.close()

    def _wait_for(self, number: int) -> Round:
        """The newest round, once there is one with this number or a later one."""
        while (found := self._rounds.newest()) is None or found.number < number:
            time.sleep(_LOOK_SECONDS)
        return found

    def _begun(self, base: Round, shards: tuple[RolloutState, ...]) -> tuple[Learner, Counters]:
        """What training goes on with after a round, in these environments."""
        mean = unnamed(self._rounds.mean(base), self._fresh.train)
        updates = base.number * self._every
        counters = Counters(
            updates=updates,
            frames=updates * frames_per_update(self._ppo),
            acted=(0,) * len(base.acted),
            seconds=base.seconds,
        )
        return Learner(self._opened.programs.placement.lay(mean, COPIED), shards), counters

    def _offer(self, base: Round, update: UpdateReport) -> None:
        """Offer what this replica has learned since the round `base`."""
        rates, acted = update.rates, update.counters.acted
        figures = Figures(
            step_success=rates.step_success,
            mean_episode_length=rates.mean_episode_length,
            episodes=rates.episodes,
            full=rates.full,
        )
        offer = Offer(replica=self._number, base=base.digest, acted=acted, figures=figures)
        leaves = enumerate(jax.tree.leaves(update.learner.shards))
        state = {f"{number:04}": plain(leaf) for number, leaf in leaves}
        seen = {_SEEN + name: np.array(value) for name, value in vars(update.episodes).items()}
        self._rounds.offer(base.number + 1, offer, named(update.learner.train), state | seen)

    def _finish(self, last: Round) -> None:
        """Write the final experts of the last round, then result.json."""
        assignment, figures = self._opened.assignment, pooled([m.figures for m in last.members])
        mean = unnamed(self._rounds.mean(last), self._fresh.train)
        storage.remove_file(assignment.paths.result_json)  # of an earlier run in the same folder
        params = self._opened.programs.unpack(mean.params)
        experts = run_io.save_finals(assignment, params, acted=last.acted)
        result = RunResult(
            run_id=assignment.run.run_id,
            frames=last.frames,
            experts=experts,
            success_rate=figures.step_success[-1],
            step_success=figures.step_success,
            mean_episode_length=figures.mean_episode_length,
            updates=last.number * self._every,
            wall_seconds=last.seconds,
            stopped_early=last.reached,
        )
        runs.write_result(assignment.paths, result)


def named(train: TrainState) -> dict[str, np.ndarray]:
    """The leaves `[E, …]` of parameters and optimizer by their paths."""
    pairs, _ = jax.tree_util.tree_flatten_with_path(train)
    return {_name(path): np.ascontiguousarray(leaf) for path, leaf in pairs}


def unnamed(arrays: Mapping[str, np.ndarray], like: TrainState) -> TrainState:
    """The state of which these are the leaves.

    Raises:
      FileRefusedError: they are of a run with other sizes.
    """
    pairs, structure = jax.tree_util.tree_flatten_with_path(like)
    if {_name(path): leaf.shape for path, leaf in pairs} != {k: v.shape for k, v in arrays.items()}:
        raise FileRefusedError(
            "the rounds of this run folder are of networks of other sizes; --no-resume begins anew"
        )
    return jax.tree.unflatten(structure, [jnp.asarray(arrays[_name(path)]) for path, _ in pairs])


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def plain(leaf: jax.Array) -> np.ndarray:
    """An array of environments, whose random keys are numbers."""
    return np.ascontiguousarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)


def restored(
    state: Mapping[str, np.ndarray] | None,
    like: tuple[RolloutState, ...],
    episodes: EpisodeLog,
) -> tuple[RolloutState, ...]:
    """The environments of which these are the leaves, if any, where those lie that they are like.

    The episodes seen in them are put into `episodes`. With another number of shards it goes on
    in other worlds.
    """
    leaves, structure = jax.tree.flatten(like)
    forms = {f"{number:04}": plain(leaf).shape for number, leaf in enumerate(leaves)}
    if not state or {k: v.shape for k, v in state.items() if k.isdecimal()} != forms:
        return like
    for name, value in vars(episodes).items():
        kept = state[_SEEN + name]
        setattr(episodes, name, int(kept) if isinstance(value, int) else kept)
    found = []
    for number, leaf in enumerate(leaves):
        kept = jnp.asarray(state[f"{number:04}"])
        kept = jax.random.wrap_key_data(kept) if _is_key(leaf) else kept
        found.append(jax.device_put(kept, leaf.sharding))
    return jax.tree.unflatten(structure, found)


def _is_key(leaf: jax.Array) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
