"""Updates until the plan's last step succeeds often enough, or the budget is spent."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flowrl.config import PPOConfig
from flowrl.envs.base import WalkingEnv
from flowrl.errors import TrainingError
from flowrl.networks.dispatch import Packed
from flowrl.ppo.acting import group_size, threads_of
from flowrl.ppo.drafts import Programs
from flowrl.ppo.metrics import EpisodeLog, Rates
from flowrl.ppo.rollout import Acted, Place
from flowrl.ppo.update import Learner, Stats


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """What a run has done so far; exact, over all starts of its trainer."""

    updates: int = 0
    frames: int = 0
    acted: tuple[int, ...]  # per local expert; the sum is `frames`
    seconds: float = 0.0  # of every start of the trainer, from its beginning on


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Where a run stands after one update.

    The arrays of `learner` are given up to the next update: use them before asking for it.
    """

    learner: Learner
    counters: Counters
    rates: Rates
    figures: dict[str, float]
    reached: bool  # the success rate that ends the run early
    ended: bool  # no update follows


def num_updates(config: PPOConfig) -> int:
    """Updates of a whole run: the fewest that take total_timesteps steps."""
    return -(-config.total_timesteps // frames_per_update(config))


def frames_per_update(config: PPOConfig) -> int:
    """Environment steps of one update, over all environments."""
    return config.num_envs * config.num_steps


def learning_rate(config: PPOConfig, updates: int) -> float:
    """The rate of the update that follows `updates` others; falls linearly when annealed."""
    left = max(0.0, 1.0 - updates / num_updates(config))
    return config.lr * left if config.anneal_lr else config.lr


def start(
    env: WalkingEnv,
    config: PPOConfig,
    programs: Programs,
    *,
    params: Packed,
    opt_state: Any,
    key: jax.Array,
) -> Learner:
    """A learner in fresh environments."""
    size = group_size(config)
    places = tuple(_fresh(env, size, *keys) for keys in programs.groups(key))
    return Learner(params, opt_state, places)


def train(
    env: WalkingEnv,
    config: PPOConfig,
    programs: Programs,
    *,
    learner: Learner,
    counters: Counters,
    born: float | None = None,
) -> Iterator[Turn]:
    """Update after update, at least one, until the budget is spent or success is frequent enough.

    The programs are ready before this returns. `learner` is given up. The counted seconds begin at
    `born`, by `time.monotonic`; without it they go on from `counters` now.

    Raises:
      TrainingError: from the iterator, when a loss or a parameter is not finite.
    """
    born = time.monotonic() - counters.seconds if born is None else born
    programs.wait()
    episodes = EpisodeLog(config.num_envs, env.num_tasks)
    turns = _turns(env, config, programs, learner=learner, counters=counters, episodes=episodes)
    return (_timed(turn, seconds=time.monotonic() - born) for turn in turns)


def _turns(
    env: WalkingEnv,
    config: PPOConfig,
    programs: Programs,
    *,
    learner: Learner,
    counters: Counters,
    episodes: EpisodeLog,
) -> Iterator[Turn]:
    ended = False
    threads = ThreadPoolExecutor(threads_of(config), thread_name_prefix="acting")
    while not ended:
        rate = np.float32(learning_rate(config, counters.updates))
        learner, stats = update(env, programs, learner, rate, threads=threads)
        stats = stats._replace(task_success=stats.task_success[..., : env.num_tasks])
        counters = _counted(counters, stats)
        _refuse_infinite(stats, config, counters)
        episodes.add(stats)
        rates = episodes.rates()
        reached = rates.full and rates.success >= config.success_state_rate
        ended = reached or counters.updates >= num_updates(config)
        figures = {name: float(figure) for name, figure in stats.figures.items()}
        yield Turn(
            learner=learner,
            counters=counters,
            rates=rates,
            figures=figures,
            reached=reached,
            ended=ended,
        )


def update(
    env: WalkingEnv,
    programs: Programs,
    learner: Learner,
    rate: np.float32,
    *,
    threads: Executor,
) -> tuple[Learner, Stats]:
    """Act, learn, and get the environments ready for the next time; `learner` is given up.

    Each group of environments is stepped by a thread of its own, and made ready by it while the
    others learn.
    """
    params, opt_state, places = learner
    wide = programs.widen(params)
    acting = list(threads.map(partial(_act, programs, wide), places))
    restocking = [
        threads.submit(env.restock, restock_key, place.env) for place, _, restock_key in acting
    ]
    acted = tuple(steps for _, steps, _ in acting)
    (params, opt_state), stats = programs.learn((params, opt_state), acted, rate)
    ready = zip(acting, restocking, strict=True)
    places = tuple(place._replace(env=restocked.result()) for (place, *_), restocked in ready)
    return Learner(params, opt_state, places), jax.device_get(stats)


def _act(programs: Programs, wide: Packed, place: Place) -> tuple[Place, Acted, jax.Array]:
    """Act, and wait in the calling thread: a call that does not wait takes yet another thread."""
    return jax.block_until_ready(programs.act(wide, place))


def _fresh(env: WalkingEnv, size: int, reset_key: jax.Array, key: jax.Array) -> Place:
    obs, state = env.reset(reset_key, size)
    return _apart(Place(state, obs, key))


def _apart(place: Place) -> Place:
    """The same, no two leaves of it being one array: acting gives its place up."""
    seen: set[int] = set()

    def own(leaf: Any) -> Any:
        twice = id(leaf) in seen
        seen.add(id(leaf))
        return jnp.copy(leaf) if twice else leaf

    return jax.tree.map(own, place)


def _timed(turn: Turn, *, seconds: float) -> Turn:
    return replace(turn, counters=replace(turn.counters, seconds=seconds))


def _counted(counters: Counters, stats: Stats) -> Counters:
    acted = tuple(old + int(new) for old, new in zip(counters.acted, stats.acted, strict=True))
    return replace(
        counters,
        updates=counters.updates + 1,
        frames=counters.frames + stats.done.size,
        acted=acted,
    )


def _refuse_infinite(stats: Stats, config: PPOConfig, counters: Counters) -> None:
    if not stats.finite:
        raise TrainingError(
            f"update {counters.updates} of {num_updates(config)} left the loss at "
            f"{float(stats.figures['loss']):g} with parameters or loss not finite; "
            f"lower --lr (now {config.lr:g}) or mend the rewards of the plan's skills"
        )
