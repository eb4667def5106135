"""Games of one player for several agents, who never meet."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flowrl.multiagent import agents, craftax_world
from flowrl.multiagent.collect import begin, collect, collecting
from flowrl.multiagent.config import LearnerConfig
from flowrl.multiagent.craftax_world import POOL, GameWorld
from flowrl.multiagent.world import open_world

KEY = jax.random.key(0)


class Countdown:
    """An engine: a world is a number that an action is taken from; at 0 or below it is over."""

    def reset(self, key):
        return jax.random.randint(key, (), 3, 100)

    def step(self, key, world, action):
        return world - action, action.astype(jnp.float32)

    def observe(self, world):
        return jnp.stack([world, world % 2]).astype(jnp.float32)

    def is_over(self, world):
        return world <= 0


@pytest.fixture
def countdown(monkeypatch):
    game = SimpleNamespace(observation_size=2, num_actions=9, make=Countdown)
    monkeypatch.setattr(craftax_world, "find_game", lambda name: game)
    return GameWorld("countdown", 3)


def take_seven(policy, obs, key):
    return jnp.full(obs.shape[:2], 7), jnp.zeros(obs.shape[:2]), jnp.zeros(obs.shape[:2])


def test_an_agent_begins_again_when_its_own_game_is_over(countdown):
    settings = LearnerConfig(num_envs=2, num_steps=40, num_minibatches=1)
    state = begin(countdown, settings, KEY)
    state, rollout, episodes = collect(countdown, settings, None, state, act=take_seven)
    worlds, done = np.asarray(rollout.obs[..., 0]), np.asarray(rollout.done)
    assert np.array_equal(done, worlds <= 7)
    assert np.array_equal(worlds[:, 1:][~done[:, :-1]], (worlds[:, :-1] - 7)[~done[:, :-1]])
    begun = worlds[:, 1:][done[:, :-1]]
    pool = {
        int(number)
        for number in jax.vmap(Countdown().reset)(
            jax.random.split(jax.random.key(craftax_world._SEED), POOL)
        )
    }
    assert {int(number) for number in begun} <= pool
    assert len(set(begun)) > 1
    assert not np.array_equal(done[0], done[1])
    assert episodes.number.tolist() == done.sum((1, 2)).tolist()


@pytest.mark.craftax
@pytest.mark.slow
def test_agents_play_craftax():
    world = open_world("Craftax-Classic-Symbolic-v1", 2)
    settings = LearnerConfig(num_envs=2, num_steps=8, num_minibatches=1, layer_size=8)
    policy = agents.init(settings, world.sizes).policy
    _, rollout, _ = collecting(world, settings)(policy, begin(world, settings, KEY))
    assert rollout.obs.shape == (2, 8, 2, 1345)
    assert np.isfinite(rollout.obs).all()
    assert np.isfinite(rollout.reward).all()
    assert (np.asarray(rollout.action) < 17).all()
    assert not np.array_equal(rollout.obs[0, 0, 0], rollout.obs[1, 0, 0])
