"""The rules of the two tiny worlds, and games of one player for agents who never meet."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flowrl.multiagent import own_worlds
from flowrl.multiagent.config import LearnerConfig
from flowrl.multiagent.own_worlds import (
    CELLS,
    LIMIT,
    POOL,
    POOL_SEED,
    SCALE,
    TURNS,
    GameWorld,
    MatchTheSign,
    OnlyApple,
    Orchard,
)
from flowrl.multiagent.world import open_world
from tests.multiagent.making import played

KEY = jax.random.key(0)
STAY, LEFT, RIGHT = 0, 1, 2


@pytest.fixture(scope="module")
def orchard():
    return OnlyApple("only_apple", 3)


def state_of(cells, apple, turn=1):
    return Orchard(jnp.array(cells), jnp.int32(apple), jnp.int32(turn))


def test_each_agent_sees_its_own_sign_and_is_paid_for_it():
    world = MatchTheSign("match_the_sign", 4)
    assert world.sizes.actions == (2, 3, 4, 2)
    state = world.reset(KEY)
    assert not world.observe(state).any()
    for turn in range(1, TURNS + 1):
        state = world.move_others(state, jax.random.fold_in(KEY, turn))
        seen = world.observe(state)
        assert seen.shape == (4, 4)
        assert (seen.sum(axis=1) == 1).all()
        signs = seen.argmax(axis=1)
        assert (np.asarray(signs) < world.sizes.actions).all()
        _, reward, done = world.step(state, signs.at[2].add(-1), KEY)
        assert reward.tolist() == [1, 1, 0, 1]
        assert bool(done) == (turn == TURNS)
        assert world.act(state, 1, signs[1], KEY)[1].tolist() == [0, 1, 0, 0]


def test_every_sign_is_shown_about_as_often():
    world = MatchTheSign("match_the_sign", 3)
    keys = jax.random.split(KEY, 3000)
    signs = jax.vmap(world.move_others, (None, 0))(world.reset(KEY), keys).sign
    for agent, number in enumerate(world.sizes.actions):
        shown = np.bincount(signs[:, agent], minlength=number)
        assert len(shown) == number
        assert abs(shown / 3000 - 1 / number).max() < 0.03


def test_the_apple_falls_in_the_first_turn_and_stays_there(orchard):
    state = orchard.reset(KEY)
    assert not orchard.observe(state)[:, :2].any()
    fallen = orchard.move_others(state, KEY)
    assert 0 <= int(fallen.apple) < CELLS
    assert int(orchard.move_others(fallen, jax.random.key(1)).apple) == int(fallen.apple)


def test_an_agent_sees_apple_and_others_from_where_it_stands(orchard):
    seen = orchard.observe(state_of([1, 4, 6], 3)) * SCALE
    assert seen.tolist() == [[8, 2, 3, 5], [8, -1, 2, -3], [8, -3, -5, -2]]


@pytest.mark.parametrize(
    ("cells", "moves", "at_once", "in_turn"),
    [
        ([2, 4, 0], [RIGHT, LEFT, STAY], [0.5, 0.5, 0], [1, 0, 0]),
        ([2, 5, 4], [STAY, LEFT, LEFT], [0, 0, 1], [0, 0, 1]),
        ([3, 0, 4], [STAY, LEFT, LEFT], [0.5, 0, 0.5], [1, 0, 0]),
        ([3, 0, 6], [LEFT, LEFT, RIGHT], [0, 0, 0], [0, 0, 0]),
    ],
    ids=["two come", "one is nearer", "one waits", "nobody"],
)
def test_the_apple_is_shared_at_once_and_taken_in_turn(orchard, cells, moves, at_once, in_turn):
    state = state_of(cells, 3)
    after, reward, done = orchard.step(state, jnp.array(moves), KEY)
    assert reward.tolist() == at_once
    assert bool(done) == bool(sum(at_once))
    total, one_by_one = 0, state
    for agent, move in enumerate(moves):
        one_by_one, reward = orchard.act(one_by_one, agent, move, KEY)
        total += reward
    assert total.tolist() == in_turn
    assert bool(orchard.is_done(one_by_one)) == bool(sum(in_turn))
    assert one_by_one.cell.tolist() == after.cell.tolist()
    assert all(0 <= cell < CELLS for cell in after.cell.tolist())


def test_an_apple_rots(orchard):
    assert not orchard.is_done(state_of([0, 0, 0], 3, LIMIT - 1))
    assert orchard.is_done(state_of([0, 0, 0], 3, LIMIT))


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
    monkeypatch.setattr(own_worlds, "find_game", lambda name: game)
    return GameWorld("countdown", 3)


def take_seven(policy, obs, key):
    return jnp.full(obs.shape[:2], 7), jnp.zeros(obs.shape[:2]), jnp.zeros(obs.shape[:2])


def test_an_agent_begins_again_when_its_own_game_is_over(countdown):
    settings = LearnerConfig(num_envs=2, num_steps=40, num_minibatches=1)
    _, [rollout], [episodes] = played(countdown, settings, epochs=1, act=take_seven)
    worlds, done = np.asarray(rollout.obs[..., 0]), np.asarray(rollout.done)
    assert np.array_equal(done, worlds <= 7)
    assert np.array_equal(worlds[:, 1:][~done[:, :-1]], (worlds[:, :-1] - 7)[~done[:, :-1]])
    begun = worlds[:, 1:][done[:, :-1]]
    keys = jax.random.split(jax.random.key(POOL_SEED), POOL)
    assert set(begun) <= set(jax.vmap(Countdown().reset)(keys).tolist())
    assert len(set(begun)) > 1
    assert not np.array_equal(done[0], done[1])
    assert episodes.number.tolist() == done.sum((1, 2)).tolist()


@pytest.mark.craftax
@pytest.mark.slow
def test_agents_play_craftax():
    world = open_world("Craftax-Classic-Symbolic-v1", 2)
    settings = LearnerConfig(num_envs=2, num_steps=8, num_minibatches=1, layer_size=8)
    _, [rollout], _ = played(world, settings, epochs=1)
    assert rollout.obs.shape == (2, 8, 2, 1345)
    assert np.isfinite(rollout.obs).all()
    assert np.isfinite(rollout.reward).all()
    assert (np.asarray(rollout.action) < 17).all()
    assert not np.array_equal(rollout.obs[0, 0, 0], rollout.obs[1, 0, 0])
