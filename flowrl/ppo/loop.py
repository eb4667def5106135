"""The training loop: updates until success is frequent enough or the budget is spent."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flowrl.config import PPOConfig
from flowrl.envs.base import WalkingEnv
from flowrl.errors import TrainingError
from flowrl.networks.grouped import Packed
from flowrl.ppo.metrics import EpisodeLog, Rates
from flowrl.ppo.programs import Programs
from flowrl.ppo.rollout import RolloutBatch, RolloutState, group_size, num_groups
from flowrl.ppo.update import Stats, TrainState


class Learner(NamedTuple):
    """Everything on the device that changes from update to update."""

    train: TrainState  # leaves [E, …]
    groups: tuple[RolloutState, ...]  # of every group of environments


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """What a run has done so far; exact, over all starts of its trainer."""

    updates: int = 0
    frames: int = 0
    acted: tuple[int, ...]  # per local expert; the sum is `frames`
    seconds: float = 0.0  # of every start of the trainer, from its beginning on


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """Where a run stands after one update.

    The next update donates the arrays of `learner`: use them before asking for it.
    """

    learner: Learner
    counters: Counters
    rates: Rates
    figures: dict[str, float]
    claims: np.ndarray  # int[tasks, 2], steps done in this start, and those without their gains
    reached: bool  # whether the success rate ends the run early
    ended: bool  # whether this update is the last one


def num_updates(config: PPOConfig) -> int:
    """Updates of a whole run: the fewest that take total_timesteps steps."""
    return -(-config.total_timesteps // frames_per_update(config))


def frames_per_update(config: PPOConfig) -> int:
    """Environment steps of one update, over all environments."""
    return config.num_envs * config.num_steps


def learning_rate(config: PPOConfig, updates: int) -> float:
    """The learning rate of the update after `updates` others; it falls linearly if annealed."""
    left = max(0.0, 1.0 - updates / num_updates(config))
    return config.lr * left if config.anneal_lr else config.lr


def start(
    env: WalkingEnv, config: PPOConfig, programs: Programs, *, train: TrainState, key: jax.Array
) -> Learner:
    """A learner in fresh environments; `train` has leaves `[E, …]`."""
    groups = []
    for reset_key, act_key in programs.group_keys(key):
        obs, state = env.reset(reset_key, group_size(config))
        groups.append(_without_aliases(RolloutState(state, obs, act_key)))
    return Learner(train, tuple(groups))


def train(
    env: WalkingEnv,
    config: PPOConfig,
    programs: Programs,
    *,
    learner: Learner,
    counters: Counters,
) -> Iterator[UpdateReport]:
    """Update, at least once, until the budget is spent or success is frequent enough.

    `learner` is donated.

    Raises:
      TrainingError: a loss or a parameter is not finite.
    """
    started = time.monotonic() - counters.seconds
    episodes = EpisodeLog(config.num_envs, env.num_tasks)
    ended, claims = False, np.zeros((env.num_tasks, 2), np.int64)
    with ThreadPoolExecutor(num_groups(config), thread_name_prefix="acting") as threads:
        while not ended:
            lr = np.float32(learning_rate(config, counters.updates))
            learner, stats = update(env, programs, learner, lr, threads=threads)
            counters = Counters(
                updates=counters.updates + 1,
                frames=counters.frames + stats.done.size,
                acted=tuple(map(int, np.add(counters.acted, stats.acted))),
                seconds=time.monotonic() - started,
            )
            _check_finite(stats, config, counters)
            episodes.add(
                done=stats.done,
                task_success=stats.task_success[..., : env.num_tasks],
                length=stats.episode_length,
                total=stats.episode_return,
            )
            claims = claims + stats.claims[: env.num_tasks]
            rates = episodes.rates()
            reached = rates.reach(config.success_state_rate)
            ended = reached or counters.updates >= num_updates(config)
            yield UpdateReport(
                learner=learner,
                counters=counters,
                rates=rates,
                figures={name: float(figure) for name, figure in stats.figures.items()},
                claims=claims,
                reached=reached,
                ended=ended,
            )


def update(
    env: WalkingEnv,
    programs: Programs,
    learner: Learner,
    lr: np.float32,
    *,
    threads: Executor,
) -> tuple[Learner, Stats]:
    """Act, learn, and restock the environments with worlds; `learner` is donated.

    Each group of environments is stepped by a thread of its own, and restocked by it while the
    others learn. The returned stats are NumPy arrays of the shapes that `Stats` says.
    """
    padded = programs.pad(learner.train.params)
    acted = list(threads.map(partial(_act, programs, padded), learner.groups))
    restocking = [threads.submit(env.restock, key, state.env) for state, _, key in acted]
    train, stats = programs.learn(learner.train, tuple(batch for _, batch, _ in acted), lr)
    ready = zip(acted, restocking, strict=True)
    groups = tuple(state._replace(env=restocked.result()) for (state, *_), restocked in ready)
    return Learner(train, groups), jax.device_get(stats)


def _act(
    programs: Programs, padded: Packed, state: RolloutState
) -> tuple[RolloutState, RolloutBatch, jax.Array]:
    """Act and wait for the result; without the wait JAX would compute in a further thread."""
    return jax.block_until_ready(programs.act(padded, state))


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
