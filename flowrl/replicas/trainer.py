"""One replica of a run: trains from round to round on what all replicas have learned.

What it holds at the beginning of a round is a function of that round: the round's mean, and the
environments and episodes that it left with its own offer. So one that is killed learns the same
once more.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import replace
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from flowrl import storage
from flowrl.envs.base import claims_of
from flowrl.envs.skill_module import open_module
from flowrl.envs.tasks import check_gains, step_ends
from flowrl.errors import FileRefusedError, FlowrlError
from flowrl.experts import checkpoint
from flowrl.experts.checkpoint import host_leaves
from flowrl.ppo import run_io
from flowrl.ppo.loop import Counters, Learner, UpdateReport, frames_per_update, train
from flowrl.ppo.metrics import EpisodeLog
from flowrl.ppo.progress import Reporter
from flowrl.ppo.rollout import RolloutState
from flowrl.ppo.trainer import open_run, prepare, use_compile_cache
from flowrl.replicas.rounds import Offer, Round, Rounds
from flowrl.runs import TrainConfig

logger = logging.getLogger(__name__)
_LOOK_SECONDS = 0.02
_NEVER = 2.0  # a share of success: the averager ends the run, for all replicas at once
_SEEN = "episodes/"  # prefix of the names of an EpisodeLog's arrays
_Tree = TypeVar("_Tree")


def run(config: TrainConfig) -> int:
    """Train as the replica of this number, until the run ends; replica 0 writes its results.

    Raises FlowrlError if the run cannot be trained; the replica's folder says why.
    """
    number = config.replica or 0
    run_paths = config.run_paths.replica(number)
    storage.make_dir(run_paths.folder)
    storage.remove_file(run_paths.last_words)
    whole, part = config.ppo, config.ppo.of_replica()
    envs = f"{part.num_envs} of {whole.num_envs} environments"
    logger.info("replica %d of %d: %s", number, whole.replicas, envs)
    if number:
        logging.getLogger("flowrl").setLevel(logging.WARNING)  # replica 0 reports
        ppo = replace(config.ppo, use_wandb=False, use_tensorboard=False)
        config = replace(config, ppo=ppo)
    try:
        with closing(Replica(config)) as replica:
            replica.train()
    except FlowrlError as error:
        storage.write_atomic(run_paths.last_words, str(error))
        raise
    return 0


class Replica:
    """A replica and the rounds of its run; `config` is the run's."""

    def __init__(self, config: TrainConfig) -> None:
        self._number, self._run = config.replica or 0, config.ppo
        use_compile_cache(config.ppo.compile_cache)
        module, ppo = open_module(config.module_path), config.ppo.of_replica()
        opened = open_run(replace(config, ppo=ppo, resume=False), module)
        self._opened, run_paths = opened, opened.assignment.run_paths
        self._ppo = replace(opened.config.ppo, success_state_rate=_NEVER)
        self._rounds, own = Rounds(run_paths.rounds), run_paths.replica(self._number)
        logged = opened.assignment._replace(run_paths=own if self._number else run_paths)
        self._reporter = Reporter(logged, self._run, own)
        self._fresh, _, _ = prepare(opened)
        if not self._number:
            config.record()
        self._episodes = EpisodeLog(self._ppo.num_envs, opened.env.num_tasks, config.ppo.replicas)
        self._claims = np.zeros((opened.env.num_tasks, 2), np.int64)  # of the rounds so far

    def train(self) -> None:
        """Train from the newest round until the last."""
        if not self._number and self._rounds.newest() is None:
            first = Round(number=0, acted=(0,) * self._opened.env.num_experts)
            self._rounds.commit(first, host_leaves(self._fresh.train))
        base = self._wait_for(0)
        shards = self._left(base)
        self._reporter.begin_training(self._of_run(self._counters(base)))
        while not base.ended:
            update = self._learn(base, shards)
            self._offer(base, update)
            shards, base = update.learner.shards, self._wait_for(base.number + 1)
        if not self._number:
            self._finish(base)

    def close(self) -> None:
        """Close the trackers."""
        self._reporter.close()

    def _wait_for(self, number: int) -> Round:
        """The newest round, once there is one with this number or a later one."""
        while (newest := self._rounds.newest()) is None or newest.number < number:
            time.sleep(_LOOK_SECONDS)
        return newest

    def _left(self, base: Round) -> tuple[RolloutState, ...]:
        """The environments that this replica left at a round, and its episodes; else fresh ones.

        With another number of shards it goes on in other worlds.
        """
        left = self._rounds.state(base.number, self._number) or {}
        with suppress(FileRefusedError):
            shards = _unnamed(left, self._fresh.shards)
            for name in vars(self._episodes):
                value = left[_SEEN + name]
                setattr(self._episodes, name, value if value.ndim else int(value))
            return shards
        return self._fresh.shards

    def _learn(self, base: Round, shards: tuple[RolloutState, ...]) -> UpdateReport:
        """Train for the updates of one round, in these environments, which are donated."""
        mean = _unnamed(self._rounds.mean(base), self._fresh.train)
        updates = train(
            self._opened.env,
            self._ppo,
            self._opened.programs,
            learner=Learner(mean, shards),
            counters=self._counters(base),
            trained=np.add(self._opened.assignment.run.trained, base.acted).tolist(),
            episodes=self._episodes,
        )
        while True:
            update = next(updates)
            self._reporter.report(replace(update, counters=self._of_run(update.counters)))
            self._claims = self._claims + claims_of(update.counts)
            check_gains(self._opened.module.tasks, self._claims, ended=update.ended)
            if update.ended or update.counters.updates >= base.updates + self._run.average_every:
                return update

    def _counters(self, base: Round) -> Counters:
        """Return this replica's counters at the start of a round; the steps in it count from 0."""
        acted = (0,) * len(base.acted)
        return Counters(updates=base.updates, acted=acted, seconds=base.seconds)

    def _of_run(self, counters: Counters) -> Counters:
        """These counters with the frames that all replicas together have about taken."""
        return replace(counters, frames=counters.updates * frames_per_update(self._run))

    def _offer(self, base: Round, update: UpdateReport) -> None:
        """Offer what this replica has learned since the round `base`."""
        offer = Offer(
            replica=self._number,
            base=base.digest,
            acted=update.counters.acted,
            rates=update.rates,
        )
        seen = {_SEEN + name: np.array(value) for name, value in vars(update.episodes).items()}
        state = host_leaves(update.learner.shards) | seen
        self._rounds.offer(base.number + 1, offer, host_leaves(update.learner.train), state)

    def _finish(self, last: Round) -> None:
        """Write the final experts of the best round, then result.json."""
        best, counters = self._rounds.best(last), self._counters(last)
        mean = _unnamed(self._rounds.mean(best), self._fresh.train)
        run_io.finish(
            self._opened.assignment,
            self._opened.programs.unpack(mean.params),
            replace(counters, frames=last.frames, acted=best.acted),
            step_success=best.rates.step_success,
            mean_episode_length=best.rates.mean_episode_length,
            step_ends=step_ends(self._opened.module, *self._episodes.counts()),
            stopped_early=last.reached,
            kept_update=None if best == last else best.updates,
            last_success_rate=None if best == last else last.rates.success,
        )


def _unnamed(arrays: Mapping[str, np.ndarray], like: _Tree) -> _Tree:
    """The tree that has these leaves, each on the devices of the leaf that it is like.

    Raises FileRefusedError if they are of a run with other sizes.
    """
    leaves = []
    for name, leaf in checkpoint.named_leaves(like).items():
        if name not in arrays or arrays[name].shape != checkpoint.numbers(leaf).shape:
            sizes = "the rounds of this run folder are of networks of other sizes"
            raise FileRefusedError(f"{sizes}; --no_resume begins anew")
        value = checkpoint.from_numbers(jnp.array(arrays[name]), leaf)
        leaves.append(jax.device_put(value, leaf.sharding))
    return jax.tree.unflatten(jax.tree.structure(like), leaves)
