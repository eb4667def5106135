"""Agents, rollouts and programs that several tests share."""

from __future__ import annotations

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flowrl.multiagent import agents
from flowrl.multiagent.buffers import Rollout
from flowrl.multiagent.collect import begin, collect, collecting
from flowrl.multiagent.config import LearnerConfig
from flowrl.multiagent.world import JAXMARL_WORLDS, Sizes, open_world

KEY = jax.random.key(7)
SIZES = Sizes((4, 4, 4), (3, 3, 3))  # of three agents in only_apple, so programs are shared
TURNS, COPIES = 4, 6
SMALL = {
    "num_envs": COPIES,
    "num_steps": TURNS,
    "layer_size": 8,
    "update_epochs": 2,
    "num_minibatches": 2,
    "capacity": 64,
    "batch_size": 8,
}
CONFIGS = {name: LearnerConfig(algorithm=name, **SMALL) for name in ("ppo", "dqn")}


def rollout(sizes: Sizes = SIZES, seed: int = 0) -> Rollout:
    """Random turns in which every agent took actions that it has, padded as a world would."""
    rng, number = np.random.default_rng(seed), len(sizes.actions)
    steps = number, TURNS, COPIES

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape).astype(np.float32))

    seen = np.arange(max(sizes.observations)) < np.asarray(sizes.observations)[:, None]
    drawn = [rng.integers(0, actions, steps[1:]) for actions in sizes.actions]
    return Rollout(
        obs=normal(*steps, seen.shape[1]) * seen[:, None, None],
        action=jnp.asarray(np.stack(drawn).astype(np.int32)),
        log_prob=-1.0 - 0.1 * jnp.square(normal(*steps)),
        value=normal(*steps),
        reward=normal(*steps),
        done=jnp.asarray(rng.random(steps) < 0.1),
        last_value=normal(number, COPIES),
        last_obs=normal(number, COPIES, seen.shape[1]) * seen[:, None],
    )


@cache
def collected(algorithm: str, name: str) -> tuple[agents.Agents, Rollout, Rollout]:
    """Three agents as they were at first, and two epochs of theirs in a world."""
    if name in JAXMARL_WORLDS:
        pytest.importorskip("jaxmarl", reason="pip install '.[marl]' in flowrl's folder")
    world, config = open_world(name, 3), CONFIGS[algorithm]
    _, rollouts, _ = played(world, config, key=jax.random.key(0))
    return agents.init(config, world.sizes), *rollouts


@cache
def learner(config: LearnerConfig):
    """`learn`, compiled once for all tests."""
    return jax.jit(partial(agents.learn, config))


@cache
def actor(config: LearnerConfig):
    """`act`, compiled once for all tests."""
    return jax.jit(partial(agents.act, config))


def same(found, wanted) -> bool:
    """Whether two trees are equal bit for bit."""
    leaves = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    return all(np.array_equal(one, two, equal_nan=True) for one, two in leaves)


def played(world, settings, *, epochs=2, act=None, key=KEY):
    """The last collector, and all rollouts and episodes, of new agents or of `act`."""
    run = collecting(world, settings)
    policy = agents.init(settings, world.sizes).policy
    if act is not None:
        run, policy = jax.jit(partial(collect, world, settings, act=act)), None
    state, found = begin(world, settings, key), []
    for _ in range(epochs):
        state, *more = run(policy, state)
        found.append(more)
    return state, *zip(*found, strict=True)
