"""Trains tiny environments on several host devices: `python -m tests.ppo.sharded OUT.npz CASES`.

A process cannot change the number of its devices, so the tests start this one with
`XLA_FLAGS=--xla_force_host_platform_device_count=4`. CASES is a JSON object from a case's name to
the flags that differ from `CONFIG`; besides, `updates`, `env`, and in `without` a collective that
is left out. For every case it writes all leaves after the last update, the figures of the last
report, and how far the devices' copies were apart after each report.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any
from unittest import mock

import jax
import numpy as np

from flowrl.config import PPOConfig
from flowrl.networks.grouped import pack
from flowrl.networks.moe import ActorCritic
from flowrl.ppo import gae, optimizer, sharding, sparse_inputs, update
from flowrl.ppo.loop import Counters, start, train
from flowrl.ppo.programs import begin_programs
from flowrl.ppo.update import TrainState
from tests.networks.making import init_experts
from tests.ppo import tiny_envs

CONFIG = {
    "num_envs": 16,
    "num_steps": 8,
    "update_epochs": 2,
    "num_minibatches": 4,
    "layer_size": 16,
    "anneal_lr": False,
    "success_state_rate": 1.0,
    "env_shards": 4,
}


@dataclass(frozen=True, slots=True)
class NoTotal(sharding.Axis):
    """An axis that forgets to add up."""

    def total(self, tree: Any) -> Any:
        return tree


@contextmanager
def left_out(collective: str | None) -> Iterator[None]:
    """Training without one of its collectives."""
    match collective:
        case None:
            patch = mock.patch.object(update, "partial", partial)
        case "columns":
            plain = sparse_inputs.columns_in_use
            patch = mock.patch.object(sparse_inputs, "columns_in_use", lambda obs, axis: plain(obs))
        case "normalised":
            plain = gae.normalised

            def alone(*rows: Any, num_experts: int, axis: sharding.Axis):
                return plain(*rows, num_experts=num_experts)

            patch = mock.patch.object(gae, "normalised", alone)
        case "rows":
            plain = update.learn

            def forgetting(*args: Any, axis: sharding.Axis, **facts: Any):
                return plain(*args, axis=NoTotal(axis.name), **facts)

            patch = mock.patch.object(sparse_inputs, "learn", forgetting)
        case _:
            raise ValueError(collective)
    with patch:
        yield


def spread_of(tree: Any) -> float:
    """The greatest difference between the devices' copies of any number."""
    apart = [0.0]
    for leaf in jax.tree.leaves(tree):
        copies = [np.asarray(part.data, np.float64) for part in leaf.addressable_shards]
        apart.extend(float(np.abs(copy - copies[0]).max()) for copy in copies)
    return max(apart)


def trained(case: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """What a case leaves, as flat arrays."""
    case = dict(case)
    updates, kind = case.pop("updates", 6), case.pop("env", "Relay")
    collective = case.pop("without", None)
    config = PPOConfig(**{**CONFIG, **case})
    config.check()
    env = getattr(tiny_envs, kind)()
    network = ActorCritic(env.num_actions, config.layer_size)
    sizes = {"observation_size": env.observation_size, "num_experts": env.num_experts}
    params = pack(init_experts(network, jax.random.key(0), **sizes))
    state = TrainState(params, optimizer.init(config, params))
    with left_out(collective):
        kept = begin_programs(env, config)
        learner = start(env, config, kept, train=state, key=jax.random.key(1))
        counters = Counters(acted=(0,) * env.num_experts)
        reports = train(env, config, kept, learner=learner, counters=counters)
        spreads = []
        for report in islice(reports, updates // config.grad_sync_period):
            spreads.append(spread_of(report.learner.train))
            leaves = [np.array(leaf) for leaf in jax.tree.leaves(report.learner.train)]
    found = {f"leaf{number:02}": leaf for number, leaf in enumerate(leaves)}
    figures = {name: np.float64(value) for name, value in report.figures.items()}
    acted = np.array(report.counters.acted)
    return {**found, **figures, "acted": acted, "spread": np.array(spreads)}


if __name__ == "__main__":
    arrays = {
        f"{name}/{key}": value
        for name, case in json.loads(sys.argv[2]).items()
        for key, value in trained(case).items()
    }
    np.savez(sys.argv[1], **arrays)
