"""The training loop: updates until success is frequent enough or the budget is spent."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flowrl.config import PPOConfig
from flowrl.envs.vector import BatchedEnv
from flowrl.errors import TrainingError
from flowrl.networks.grouped import Packed
from flowrl.ppo.loss import Hyperparameters
from flowrl.ppo.metrics import EpisodeLog
from flowrl.ppo.programs import Programs
from flowrl.ppo.rollout import RolloutBatch, RolloutState
from flowrl.ppo.sharding import COPIED, SPLIT, shard_size
from flowrl.ppo.update import Stats, TrainState
from flowrl.program_cache import Device
from flowrl.rates import Rates


class Learner(NamedTuple):
    """Everything on the device that changes from update to update."""

    train: TrainState  # leaves [E, …]
    shards: tuple[RolloutState, ...]  # of every shard of this process


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """The work of a run so far; exact, over all starts of its trainer."""

    updates: int = 0
    frames: int = 0
    acted: tuple[int, ...]  # per local expert; the sum is `frames`
    seconds: float = 0.0  # of every start of the trainer, from its beginning on


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """The standing of a run after one update.

    The next update donates the arrays of `learner`: use them before asking for it.
    """

    learner: Learner
    counters: Counters
    episodes: EpisodeLog
    rates: Rates
    figures: dict[str, float]
    counts: np.ndarray  # int[tasks, …], since the report before: see `count_steps`
    ended_episodes: int  # since then
    reached: bool  # whether the success rate ends the run early
    ended: bool  # whether this update is the last one
    stop: int  # exit code to stop with, if some process was asked to; else 0


def num_updates(config: PPOConfig) -> int:
    """Updates of a whole run: the fewest that take total_timesteps steps."""
    return -(-config.total_timesteps // frames_per_update(config))


def frames_per_update(config: PPOConfig) -> int:
    """Environment steps of one update, over all environments."""
    return config.num_envs * config.num_steps


def learning_rate(config: PPOConfig, updates: int) -> float:
    """The learning rate of the update after `updates` others; it falls linearly if annealed."""
    steps = max(config.total_timesteps, config.schedule_timesteps)
    left = max(0.0, 1.0 - updates / num_updates(replace(config, total_timesteps=steps)))
    return config.lr * left if config.anneal_lr else config.lr


def settled(config: PPOConfig, frames: np.ndarray) -> np.ndarray:
    """The share of the learning rate with which experts that have so many frames learn on."""
    if not config.settled_frames:
        return np.ones(len(frames))
    return config.settled_frames / (config.settled_frames + frames)


def start(
    env: BatchedEnv, config: PPOConfig, programs: Programs, *, train: TrainState, key: jax.Array
) -> Learner:
    """A learner in fresh environments; `train` has leaves `[E, …]`."""
    placement, keys = programs.placement, programs.shard_keys(key)
    shards = []
    for number, device in placement.local_shards:
        reset_key, act_key = placement.put(keys[number], device)
        obs, state = env.on(device).reset(reset_key, shard_size(config))
        own = _without_aliases(RolloutState(state, obs, act_key))
        shards.append(placement.put(own, device))
    return Learner(placement.lay(train, COPIED), tuple(shards))


def train(  # noqa: PLR0913
    env: BatchedEnv,
    config: PPOConfig,
    programs: Programs,
    *,
    learner: Learner,
    counters: Counters,
    trained: Sequence[int] = (),
    episodes: EpisodeLog | None = None,
    stop: Callable[[], int | None] = lambda: None,
) -> Iterator[UpdateReport]:
    """Update, at least once, until the budget is spent or success is frequent enough.

    `stop` is called in every update when it has acted; all processes report its exit code.
    `trained` has the frames that each expert had before the run.

    Reports come after updates at which all devices have the same parameters: every
    `grad_sync_period`-th one and the last. `learner` is donated; `episodes` were seen before.

    Raises TrainingError if a loss or a parameter is not finite.
    """
    episodes = episodes or EpisodeLog(config.num_envs, env.num_tasks)
    counts, over, code = 0, 0, 0
    updates = _updates(
        env, config, programs, learner=learner, counters=counters, trained=trained, stop=stop
    )
    for after, counted, stats, whole in updates:
        code = max(code, int(stats.stop))
        of_update, ended = _record(episodes, stats, env.num_tasks)
        counts, over = counts + of_update, over + ended
        if not whole:
            continue
        rates = episodes.rates()
        reached = rates.reach(config.success_state_rate)
        yield UpdateReport(
            learner=after,
            counters=counted,
            episodes=episodes,
            rates=rates,
            figures={name: float(figure) for name, figure in stats.figures.items()},
            counts=np.asarray(counts),
            ended_episodes=over,
            reached=reached,
            ended=reached or counted.updates >= num_updates(config),
            stop=code,
        )
        counts, over = 0, 0
        if reached:
            return


def _record(episodes: EpisodeLog, stats: Stats, num_tasks: int) -> tuple[np.ndarray, int]:
    """Add an update's episodes; returns its counts of steps `[tasks, …]`, and of ended episodes."""
    episodes.add(
        done=stats.done,
        task_success=stats.task_success[..., :num_tasks],
        length=stats.episode_length,
        total=stats.episode_return,
    )
    counts, ended = np.asarray(stats.counts[:num_tasks], np.int64), int(stats.done.sum())
    episodes.count(counts, ended=ended)
    return counts, ended


def _updates(  # noqa: PLR0913
    env: BatchedEnv,
    config: PPOConfig,
    programs: Programs,
    *,
    learner: Learner,
    counters: Counters,
    trained: Sequence[int],
    stop: Callable[[], int | None],
) -> Iterator[tuple[Learner, Counters, Stats, bool]]:
    """Update until the budget is spent; True if all devices have the same parameters then."""
    placement, started = programs.placement, time.monotonic() - counters.seconds
    apart: Any = 0  # int32[D, E], steps since the devices' copies were equal
    spent = False
    with ThreadPoolExecutor(max(len(placement.local), config.acting_threads or 1)) as threads:
        while not spent:
            frames = np.add(trained or 0, counters.acted)
            rates = learning_rate(config, counters.updates) * settled(config, frames)
            hyper = Hyperparameters.of(config, rates)
            learner, stats = update(env, programs, learner, hyper, threads=threads, stop=stop)
            counters = Counters(
                updates=counters.updates + 1,
                frames=counters.frames + stats.done.size,
                acted=tuple(map(int, np.add(counters.acted, stats.acted.sum(axis=0)))),
                seconds=time.monotonic() - started,
            )
            _check_finite(stats, config, counters)
            apart = apart + stats.acted
            spent = counters.updates >= num_updates(config)
            whole = spent or counters.updates % config.grad_sync_period == 0
            if whole:
                rows = placement.lay(apart, SPLIT)
                learner, apart = learner._replace(train=programs.agree(learner.train, rows)), 0
            yield learner, counters, stats, whole


def update(
    env: BatchedEnv,
    programs: Programs,
    learner: Learner,
    hyper: Hyperparameters,
    *,
    threads: Executor,
    stop: Callable[[], int | None] = lambda: None,
) -> tuple[Learner, Stats]:
    """Act, learn, and restock the environments with worlds; `learner` is donated.

    Each shard is stepped by one thread, and restocked by it while the others learn. `stop` is
    called as late as learning can take its exit code along. The returned stats are NumPy arrays of
    the shapes that `Stats` says.
    """
    placement = programs.placement
    copies = placement.copies(programs.pad(learner.train.params))
    acted = list(threads.map(partial(_act, programs, copies), learner.shards))
    restocking = [
        threads.submit(env.on(device).restock, key, state.env)
        for (_, device), (state, _, key) in zip(placement.local_shards, acted, strict=True)
    ]
    batches = placement.join_shards([batch for _, batch, _ in acted])
    stops = placement.lay(np.full(len(placement.devices), stop() or 0, np.int32), SPLIT)
    train, stats = programs.learn(learner.train, batches, hyper, stops)
    ready = zip(acted, restocking, strict=True)
    shards = tuple(state._replace(env=restocked.result()) for (state, *_), restocked in ready)
    return Learner(train, shards), jax.device_get(stats)


def _act(
    programs: Programs, copies: Mapping[Device, Packed], state: RolloutState
) -> tuple[RolloutState, RolloutBatch, jax.Array]:
    """Act and wait for the result; without the wait JAX would compute in a further thread."""
    (device,) = state.obs.devices()
    return jax.block_until_ready(programs.act(copies[device], state))


def _without_aliases(state: RolloutState) -> RolloutState:
    """Copy leaves that are one array, because acting donates its state."""
    seen: set[int] = set()

    def own(leaf: Any) -> Any:
        twice = id(leaf) in seen
        seen.add(id(leaf))
        return jnp.copy(leaf) if twice else leaf

    return jax.tree.map(own, state)


def _check_finite(stats: Stats, config: PPOConfig, counters: Counters) -> None:
    if not stats.finite:
        raise TrainingError(
            f"update {counters.updates} of {num_updates(config)} left the loss at "
            f"{float(stats.figures['loss']):g} with parameters or loss not finite; "
            f"lower --lr (now {config.lr:g}) or mend the rewards of the plan's skills"
        )
