"""Both tiny worlds are learnt, whose best play is known."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import jax
import numpy as np
import pytest

from flowrl.multiagent import agents
from flowrl.multiagent.collect import begin, collecting
from flowrl.multiagent.config import LearnerConfig
from flowrl.multiagent.own_worlds import CELLS, TURNS
from flowrl.multiagent.world import open_world

AGENTS, MEASURED = 3, 10
SETTINGS = LearnerConfig(
    num_envs=32,
    num_steps=32,
    layer_size=32,
    num_minibatches=4,
    lr=(3e-3,),
    gamma=(0.8,),  # a later apple is worth clearly less
    capacity=8192,
    batch_size=128,
    epsilon_decay_epochs=20,
)
SMALL = replace(SETTINGS, num_envs=8, num_steps=16, layer_size=8, num_minibatches=2, lr=(1e-2,))


@cache
def programs(name, settings):
    world = open_world(name, AGENTS)
    return world, collecting(world, settings), jax.jit(partial(agents.learn, settings))


def trained(name, settings, *, seed=0, epochs=60):
    """Returns [A] and length of episodes, the mean of what learnt agents do without exploring."""
    world, run, learn = programs(name, settings)
    learner = agents.init(replace(settings, seed=seed), world.sizes)
    state, found = begin(world, settings, jax.random.key(seed)), []
    for epoch in range(epochs):
        state, rollout, _ = run(learner.policy, state)
        key = jax.random.fold_in(jax.random.key(seed + 100), epoch)
        learner, _ = learn(learner, rollout, key)
    assert learner.alive.all()
    learnt = learner.policy._replace(epsilon=jax.numpy.zeros(AGENTS))
    for _ in range(MEASURED):
        state, _, episodes = run(learnt, state)
        found.append(jax.device_get(episodes))
    total = jax.tree.map(lambda *each: sum(each), *found)
    turns = MEASURED * settings.num_envs * settings.num_steps
    return total.total_return / total.number, turns / total.number[0]


def best_apples(turns):
    """Each agent's share of the apples, and the turns they take, if all go straight to them."""
    cells = np.indices((CELLS,) * (AGENTS + 1)).reshape(AGENTS + 1, -1)
    needs = np.maximum(np.abs(cells[:AGENTS] - cells[AGENTS]), 1)
    first = needs == needs.min(0)
    if turns == "sequential":
        first = np.arange(AGENTS)[:, None] == first.argmax(0)
    return (first / first.sum(0)).mean(1), needs.min(0).mean()


def test_signs_are_learnt_in_seconds():
    returns, _ = trained("match_the_sign", SMALL, epochs=40)
    assert (returns > 0.9 * TURNS).all()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("algorithm", ["ppo", "dqn"])
def test_every_agent_learns_its_signs(algorithm, seed):
    returns, _ = trained("match_the_sign", replace(SETTINGS, algorithm=algorithm), seed=seed)
    assert (returns > 0.985 * TURNS).all()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("turns", ["simultaneous", "sequential"])
@pytest.mark.parametrize("algorithm", ["ppo", "dqn"])
def test_agents_learn_to_be_first_at_the_apple(algorithm, turns, seed):
    settings = replace(SETTINGS, algorithm=algorithm, turns=turns)
    shares, length = trained("only_apple", settings, seed=seed)
    best_shares, best_length = best_apples(turns)
    assert length == pytest.approx(best_length, rel=0.025)
    assert shares == pytest.approx(best_shares, abs=0.03)
