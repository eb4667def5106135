"""Trains tiny environments on four host devices: `python -m tests.ppo.sharded OUT.npz`.

A process cannot change the number of its devices, so the tests start this one with
`XLA_FLAGS=--xla_force_host_platform_device_count=4`, once for all cases. It writes what each of
them leaves, as `case/name`.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Container, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from flowrl.config import PPOConfig
from flowrl.networks.grouped import pack
from flowrl.networks.moe import ActorCritic
from flowrl.paths import RunPaths
from flowrl.ppo import gae, loop, optimizer, programs, run_io, sparse_inputs, update
from flowrl.ppo.loop import Counters, Learner, UpdateReport, start, train
from flowrl.ppo.loss import Hyperparameters
from flowrl.ppo.metrics import EpisodeLog
from flowrl.ppo.programs import Programs, begin_programs
from flowrl.ppo.run_io import Best, Resumed
from flowrl.ppo.sharding import SPLIT, Axis, place
from flowrl.ppo.update import TrainState
from tests.networks.making import init_experts
from tests.ppo.tiny_envs import Crowd, Matched, Steady, TinyEnv

Found = dict[str, Any]
STOPPED_AT, WHOLE = 5, 6  # updates
KEY = jax.random.key(1)
CONFIG = PPOConfig(
    num_envs=16,
    num_steps=8,
    update_epochs=2,
    num_minibatches=4,
    layer_size=8,
    anneal_lr=False,
    success_state_rate=1.0,
    env_shards=4,
)
ON = {devices: replace(CONFIG, num_devices=devices) for devices in (1, 2, 4)}


PAIR = replace(ON[2], num_envs=8, env_shards=2)


@cache
def acting_of(env: TinyEnv) -> Any:
    return begin_programs(env, ON[4]).act


@cache
def programs_of(env: TinyEnv, config: PPOConfig) -> Programs:
    return begin_programs(env, config)._replace(act=acting_of(env))  # compiled once for each device


def fresh(env: TinyEnv) -> TrainState:
    network = ActorCritic(env.num_actions, CONFIG.layer_size)
    sizes = {"observation_size": env.observation_size, "num_experts": env.num_experts}
    params = pack(init_experts(network, jax.random.key(0), **sizes))
    return TrainState(params, optimizer.init(params))


def learner_of(env: TinyEnv, config: PPOConfig) -> Learner:
    return start(env, config, programs_of(env, config), train=fresh(env), key=KEY)


def leaves_of(state: TrainState) -> Found:
    return numbered("param", state.params) | numbered("moment", state.opt_state)


def numbered(name: str, tree: Any) -> Found:
    return {f"{name}{n:03}": np.array(leaf) for n, leaf in enumerate(jax.tree.leaves(tree))}


def spread_of(tree: Any) -> float:
    """The greatest difference between the devices' copies of any number."""
    apart = [0.0]
    for leaf in jax.tree.leaves(tree):
        copies = [np.asarray(part.data, np.float64) for part in leaf.addressable_shards]
        apart.extend(float(np.abs(copy - copies[0]).max()) for copy in copies)
    return max(apart)


def heard(programs: Programs, found: Found, asked: Container[int]) -> Programs:
    """The programs; the first update's rollout and stats are kept, and the columns seen in all.

    Only the last device is asked to stop, in the updates `asked`.
    """
    placement = programs.placement
    others = [0] * (len(placement.devices) - 1)
    found["columns"] = []

    def learn(state: TrainState, batches: Any, hyper: Any, _: Any):
        parts = [placement.copies(batch) for batch in batches]
        shards = [part[device] for device in placement.devices for part in parts]
        used = [np.asarray(shard.steps.obs).any(axis=(0, 1)) for shard in shards]
        found["columns"].append(np.any(used, axis=0).sum())
        code = 85 if len(found["columns"]) in asked else 0
        codes = placement.lay(np.array([*others, code], np.int32), SPLIT)
        state, stats = programs.learn(state, batches, hyper, codes)
        if len(found["columns"]) == 1:
            found.update(numbered("rollout", shards))
            of_envs = ("done", "episode_return", "episode_length", "task_success", "counts")
            found.update({name: np.array(getattr(stats, name)) for name in of_envs})
        return state, stats

    return programs._replace(learn=learn)


def trained(
    env: TinyEnv,
    config: PPOConfig,
    *,
    updates: int = WHOLE,
    begun: Learner | None = None,
    programs: Programs | None = None,
    after: Callable[[UpdateReport], None] = lambda report: None,
    asked: Container[int] = range(1, 100),
    episodes: EpisodeLog | None = None,
) -> Found:
    """What so many updates leave, at most; `after` is called with each report."""
    found: Found = {"spread": [], "reports": []}
    programs = heard(programs or programs_of(env, config), found, asked)
    begun = begun or learner_of(env, config)
    counters = Counters(acted=(0,) * env.num_experts)
    reports = train(env, config, programs, learner=begun, counters=counters, episodes=episodes)
    for report in islice(reports, -(-updates // config.grad_sync_period)):
        after(report)
        done = report.counters
        ends = (report.reached, report.ended, report.stop)
        found["reports"].append((done.updates, done.frames, sum(done.acted), *ends))
        found["spread"].append(spread_of(report.learner.train))
        found["stop"], found["acted"] = report.stop, report.counters.acted
        found |= leaves_of(report.learner.train) | report.figures
    return found


def periods_cut_short(env: Steady, config: PPOConfig) -> Iterator[tuple[str, Found]]:
    """A budget that is no multiple of the period, a success and a stop within one."""
    programs, frames = programs_of(env, config), loop.frames_per_update(config)
    begun = partial(uneven, env, config)
    six = replace(config, total_timesteps=6 * frames)
    yield "budget", trained(env, six, updates=99, begun=begun(), programs=programs, asked=())
    seen, one = EpisodeLog(config.num_envs, 1), np.ones((64, config.num_envs), np.int64)
    seen.add(done=one, task_success=one[..., None] > 0, length=one, total=one)
    easy = {"programs": programs, "asked": (), "episodes": seen}
    goal = replace(config, success_state_rate=0.2)
    yield "success", trained(env, goal, updates=99, begun=begun(), **easy)
    yield "stop", trained(env, config, updates=4, begun=begun(), asked=(2,))


def saved(folder: Path, env: TinyEnv, config: PPOConfig) -> Found:
    """What a training leaves that saved a checkpoint on its way."""

    def save(report: UpdateReport) -> None:
        if report.counters.updates == STOPPED_AT:
            run_io.save_checkpoint(RunPaths(folder, 0), config, report, Best.of(report))

    return trained(env, config, after=save)


def resumed(folder: Path, env: TinyEnv, config: PPOConfig) -> Found:
    """What the updates after the checkpoint leave."""
    state, counters = fresh(env), Counters(acted=(0,) * env.num_experts)
    like = Resumed(state, KEY, counters, Best.none(state.params, env.num_tasks, counters.acted))
    found = run_io.load_checkpoint(RunPaths(folder, 0), config, like)
    programs = programs_of(env, config)
    begun = start(env, config, programs, train=found.train, key=found.key)
    return trained(env, config, updates=WHOLE - STOPPED_AT, begun=begun)


def uneven(env: Steady, config: PPOConfig) -> Learner:
    """A learner whose expert 1 acts in the last shard only, and expert 0 in all."""
    learner = learner_of(env, config)
    *others, last = learner.shards
    expert = last.env.expert + np.array([0, 0, 1, 1], np.int32)
    return learner._replace(shards=(*others, last._replace(env=last.env._replace(expert=expert))))


def gradients_at_times(env: Steady, config: PPOConfig) -> Found:
    """Another rule: every device moves by its gradients, in every P-th update by their mean."""
    rates, period = np.full(env.num_experts, config.lr), config.grad_sync_period
    hyper = Hyperparameters.of(config, rates)
    apart = programs_of(env, config)
    together = programs_of(env, replace(config, grad_sync_period=1))
    learner, spread = uneven(env, config), []
    with ThreadPoolExecutor(config.num_devices) as threads:
        for number in range(1, 2 * period + 1):
            programs = apart if number % period else together
            learner, _ = loop.update(env, programs, learner, hyper, threads=threads)
            if number % period == 0:
                spread.append(spread_of(learner.train.params))
    return {"spread": spread}


def last_shard_alone(env: Steady, config: PPOConfig) -> Found:
    """What the last shard's environments leave by themselves, on one device."""
    last = jax.tree.map(jnp.copy, uneven(env, config).shards[-1])
    config = replace(config, num_devices=1, env_shards=1, num_envs=4, grad_sync_period=1)
    begun = learner_of(env, config)._replace(shards=(jax.device_put(last, jax.devices()[0]),))
    return trained(env, config, updates=4, begun=begun)


def columns_of_parts() -> Found:
    """The columns that each device finds in use, whose own are others than all."""
    placement = place(ON[4])
    obs = np.zeros((4, 1, 160), np.float32)
    for device in range(4):
        obs[device, :, 40 * device : 40 * device + 40] = 1

    def found(rows: jax.Array) -> Any:
        columns = sparse_inputs.columns_in_use([rows], placement.axis)
        return columns.used[None], columns.order[None]

    spread = jax.shard_map(
        found, mesh=placement.mesh, in_specs=SPLIT, out_specs=SPLIT, check_vma=False
    )
    used, order = jax.jit(spread)(placement.lay(obs, SPLIT))
    return {"used": used, "order": order}


@dataclass(frozen=True, slots=True)
class Forgetful(Axis):
    """An axis without one of its reductions."""

    forgets: str = ""

    def mean(self, tree: Any) -> Any:
        return tree if self.forgets == "mean" else Axis.mean(self, tree)

    def total(self, tree: Any) -> Any:
        return tree if self.forgets == "total" else Axis.total(self, tree)

    def greatest(self, leaf: jax.Array) -> jax.Array:
        return leaf if self.forgets == "greatest" else Axis.greatest(self, leaf)


def with_axis(module: Any, name: str, make: Callable[[str | None], Axis]) -> Any:
    """A patch that gives a function another axis."""
    whole = getattr(module, name)

    def other(value: Any) -> Any:
        return make(value.name) if isinstance(value, Axis) else value

    def given(*args: Any, **named: Any) -> Any:
        return whole(*map(other, args), **{key: other(value) for key, value in named.items()})

    return mock.patch.object(module, name, given)


def without(collectives: str, env: TinyEnv, config: PPOConfig, begun: Learner) -> Found:
    """What is left of two updates without these collectives."""
    with ExitStack() as patches:
        patches.enter_context(with_axis(update, "_rows", Axis))  # `learn` does not tell it
        for collective in collectives.split("+"):
            module, name, forgets = COLLECTIVES[collective]
            patches.enter_context(with_axis(module, name, partial(Forgetful, forgets=forgets)))
        mutated = begin_programs(env, config).learn  # traced when it is called first
        whole = programs_of(env, config)._replace(learn=mutated)
        return trained(env, config, programs=whole, updates=2, begun=begun)


COLLECTIVES = {
    "columns": (sparse_inputs, "columns_in_use", "greatest"),
    "normalised": (gae, "normalised", "total"),
    "rows": (sparse_inputs, "learn", "total"),
    "gradients": (sparse_inputs, "learn", "mean"),
    "stop": (programs, "stats_of_all", "greatest"),
}


def cases(folder: Path) -> Iterator[tuple[str, Found]]:
    """Every case by its name."""
    three, steady = Crowd(3), Steady()
    for devices, config in ON.items():
        yield f"three{devices}", saved(folder / str(devices), three, config)
    for before in ON:
        for after, config in ON.items():
            yield f"from{before}to{after}", resumed(folder / str(before), three, config)
    for name, env in {"one": Matched(), "many": Crowd(16, columns=20)}.items():
        for devices in (1, 2):
            yield f"{name}{devices}", trained(env, ON[devices])
    yield "columns", columns_of_parts()

    period = replace(PAIR, grad_sync_period=4)
    yield "fresh", leaves_of(fresh(steady))
    yield "alone", last_shard_alone(steady, period)
    for updates in (4, 8):
        begun = uneven(steady, period)
        yield f"period{updates}", trained(steady, period, updates=updates, begun=begun)
    yield from periods_cut_short(steady, period)
    yield "gradients at times", gradients_at_times(steady, period)
    yield "pair", trained(steady, PAIR, updates=2, begun=uneven(steady, PAIR))
    yield "without rows", without("rows", steady, PAIR, uneven(steady, PAIR))


def mutated() -> Iterator[tuple[str, Found]]:
    """Cases of programs that lack another collective, and what the whole one leaves."""
    three, steady = Crowd(3), Steady()
    yield "without columns", without("columns", three, ON[4], learner_of(three, ON[4]))
    yield "pair", trained(steady, PAIR, updates=2, begun=uneven(steady, PAIR))
    for collectives in ("normalised", "gradients+stop"):
        found = without(collectives, steady, PAIR, uneven(steady, PAIR))
        yield f"without {collectives}", found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        arrays = {}
        for case, found in mutated() if "mutated" in sys.argv else cases(Path(folder)):
            if "-v" in sys.argv:
                print(case, round(time.process_time(), 1), flush=True)
            arrays |= {f"{case}/{name}": np.asarray(value) for name, value in found.items()}
    np.savez(sys.argv[1], **arrays)
