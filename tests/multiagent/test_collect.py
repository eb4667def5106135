"""Collecting: all agents in one call, at once or one after another, compiled or called."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import settings as example_settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from flowrl.errors import ConfigError, TrainingError
from flowrl.multiagent import agents
from flowrl.multiagent.collect import begin, collect, collecting, experience_like
from flowrl.multiagent.config import LearnerConfig
from flowrl.multiagent.own_worlds import CELLS, TURNS, MatchTheSign, OnlyApple
from flowrl.multiagent.world import Sizes
from tests.multiagent.making import KEY, played, same

SMALL = {"num_envs": 5, "num_steps": 11, "layer_size": 8}


def config(**fields):
    return LearnerConfig(**{**SMALL, "num_minibatches": 1, **fields})


@pytest.fixture(scope="module")
def signs():
    """Three agents that match signs: at once, and one after another."""
    world = MatchTheSign("match_the_sign", 3)
    return {turns: played(world, config(turns=turns)) for turns in ("simultaneous", "sequential")}


@pytest.fixture(scope="module")
def apples():
    world = OnlyApple("only_apple", 3)
    return {
        turns: played(world, config(turns=turns), act=straight_to_it, epochs=1)
        for turns in ("simultaneous", "sequential")
    }


def straight_to_it(policy, obs, key):
    """The best play, for who sees the apple."""
    far = obs[..., 1]
    action = jnp.where(far < 0, 1, jnp.where(far > 0, 2, 0))
    return action, jnp.zeros(far.shape), far


def without_keys(state):
    return state._replace(key=jax.random.key_data(state.key))


def test_a_rollout_holds_what_each_agent_saw_did_and_earned(signs):
    state, rollouts, _ = signs["simultaneous"]
    for rollout in rollouts:
        assert rollout.obs.shape == (3, 11, 5, 4)
        assert {leaf.shape for leaf in rollout[1:6]} == {(3, 11, 5)}
        assert rollout.last_obs.shape == (3, 5, 4)
        paid = rollout.obs.argmax(-1) == rollout.action
        assert np.array_equal(rollout.reward, paid)
        assert (np.asarray(rollout.action).max((1, 2)) < [2, 3, 4]).all()
    assert int(state.epoch) == 2
    assert np.array_equal(rollouts[0].last_obs, rollouts[1].obs[:, 0])


def test_episodes_go_on_over_the_end_of_an_epoch(signs):
    state, rollouts, episodes = signs["simultaneous"]
    done = np.concatenate([rollout.done for rollout in rollouts], axis=1)
    ends = np.arange(1, 23) % TURNS == 0
    assert np.array_equal(done, np.broadcast_to(ends[None, :, None], done.shape))
    assert [each.number.tolist() for each in episodes] == [[5] * 3, [5] * 3]
    reward = np.concatenate([rollout.reward for rollout in rollouts], axis=1)
    total = sum(each.total_return for each in episodes)
    assert np.array_equal(total, reward[:, : 2 * TURNS].sum((1, 2)))
    assert np.array_equal(state.episode_return, reward[:, 2 * TURNS :].sum(1))


def test_every_epoch_draws_anew(signs):
    _, (first, second), _ = signs["simultaneous"]
    assert (first.obs[:, 1:] != second.obs[:, 1:]).any(-1).mean() > 0.4


class Draws(MatchTheSign):
    """What an agent does is rewarded by a number that is drawn then."""

    def act(self, state, agent, action, key):
        return state, jnp.zeros(3).at[agent].set(jax.random.uniform(key))


def test_in_turn_every_action_has_random_numbers_of_its_own():
    _, rollouts, _ = played(Draws("draws", 3), config(turns="sequential"))
    numbers = np.concatenate([rollout.reward for rollout in rollouts], axis=1)
    assert len(np.unique(numbers)) == numbers.size


def test_agents_that_do_not_meet_may_take_their_turns_as_they_like(signs):
    (one, first, episodes), (other, second, more) = signs.values()
    assert same(without_keys(one), without_keys(other))
    assert same(first, second)
    assert same(episodes, more)


def test_only_in_turn_an_agent_sees_what_was_done_before_it(apples):
    (_, [at_once], _), (_, [in_turn], _) = apples.values()
    assert (at_once.obs[..., 0] == 1).all()
    gone = in_turn.obs[..., 0] == 0
    assert not gone[0].any()
    assert gone[1:].any()
    took_it = np.cumsum(in_turn.reward, axis=0) - in_turn.reward
    assert np.array_equal(gone, took_it > 0)


class Gifts(MatchTheSign):
    """In each turn every agent gives each other one as much as it says, and nothing to itself."""

    def act(self, state, agent, action, key):
        return state, (jnp.arange(3) != agent) * jnp.float32(action)


def test_what_others_give_an_agent_belongs_to_its_newest_action():
    world = Gifts("gifts", 3)
    _, rollouts, episodes = played(world, config(turns="sequential"))
    given = np.concatenate([rollout.action for rollout in rollouts], axis=1).astype(np.float32)
    found = np.concatenate([rollout.reward for rollout in rollouts], axis=1)
    for agent, others in enumerate(([], [0], [0, 1])):
        before = given[others].sum(0)  # given in a turn before the agent has acted
        after = given.sum(0) - given[agent] - before
        for turn in range(22):
            last, first = turn % TURNS == TURNS - 1, turn % TURNS == 0
            following = 0 if last or turn in {10, 21} else before[turn + 1]
            kept = before[turn] if first or turn == 11 else 0  # an epoch has 11 turns
            assert np.array_equal(found[agent, turn], after[turn] + following + kept)
    returns = sum(each.total_return for each in episodes)
    assert np.array_equal(returns, (given.sum(0) - given)[:, : 2 * TURNS].sum((1, 2)))


def test_going_straight_to_the_apple_takes_as_long_as_the_nearest_needs(apples):
    cells = np.indices((CELLS,) * 4).reshape(4, -1)
    nearest = np.abs(cells[:3] - cells[3]).min(0)
    expected = np.maximum(nearest, 1).mean()
    world = OnlyApple("only_apple", 3)
    many = config(num_envs=100, num_steps=80)
    _, _, [episodes] = played(world, many, act=straight_to_it, epochs=1)
    mean = 100 * 80 / float(episodes.number[0])
    assert mean == pytest.approx(expected, rel=0.05)
    assert float(episodes.total_return.sum()) == pytest.approx(float(episodes.number[0]))
    for _, _, [episodes] in apples.values():
        assert float(episodes.total_return.sum()) == pytest.approx(float(episodes.number[0]))


@pytest.mark.parametrize("turns", ["simultaneous", "sequential"])
def test_called_from_python_a_world_goes_as_compiled(turns):
    world = OnlyApple("only_apple", 2)
    fields = {"num_envs": 2, "num_steps": 4, "turns": turns}
    compiled = played(world, config(**fields))
    called = played(world, config(**fields, acting="call"))
    for one, other in zip(compiled[1], called[1], strict=True):
        assert np.array_equal(one.action, other.action)
        assert np.array_equal(one.reward, other.reward)
        assert np.array_equal(one.obs, other.obs)
        assert np.allclose(one.value, other.value, atol=1e-6)
    assert same(without_keys(compiled[0]), without_keys(called[0]))


class OldWorld:
    """In the style of PettingZoo's parallel environments: NumPy, dictionaries, agents' names."""

    possible_agents = ("red", "blue")
    widths: ClassVar = {"red": 2, "blue": 3}

    def __init__(self, count, rng):
        self.count, self.rng = count, rng

    def observations(self):
        return {name: np.full(self.widths[name], self.count) for name in self.possible_agents}

    def step(self, actions):
        self.count += 1 + actions["red"]
        rewards = {name: float(actions[name]) for name in self.possible_agents}
        ended = dict.fromkeys(self.possible_agents, self.count > 6)
        return self.observations(), rewards, ended, {}


class Count(NamedTuple):
    """All that the world remembers, as arrays."""

    count: np.ndarray


class Adapter:
    """`World` for an OldWorld: pads its observations, and keeps its state as arrays."""

    name, sizes = "old", Sizes((2, 3), (2, 4))

    def reset(self, key):
        return Count(np.int64(0))

    def observe(self, state):
        seen = OldWorld(state.count, None).observations()
        return [np.pad(row, (0, 3 - len(row))) for row in seen.values()]

    def step(self, state, actions, key):
        rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
        world = OldWorld(state.count, rng)
        _, rewards, ended, _ = world.step(dict(zip(world.possible_agents, actions, strict=True)))
        return Count(world.count), np.array(list(rewards.values())), all(ended.values())


def test_a_world_that_is_not_in_jax_is_called():
    settings = config(acting="call", num_envs=3)
    state, rollouts, episodes = played(Adapter(), settings)
    again, rerun, _ = played(Adapter(), settings)
    assert same((without_keys(state), rollouts), (without_keys(again), rerun))
    for rollout in rollouts:
        assert (rollout.obs[0, ..., 2] == 0).all()
        assert np.array_equal(rollout.obs[0, ..., 0], rollout.obs[1, ..., 2])
        assert np.array_equal(rollout.reward, rollout.action)
        assert (rollout.action[0] < 2).all()
    assert episodes[0].number.tolist() == rollouts[0].done.sum((1, 2)).tolist()
    assert not np.asarray(rollouts[0].obs[:, 0]).any()


def test_a_changed_observation_is_named_with_agent_and_epoch(monkeypatch):
    monkeypatch.setattr(OldWorld, "widths", {"red": 2, "blue": 1})
    world, settings = Adapter(), config(acting="call", num_envs=2)
    state = begin(world, settings, KEY)
    grow = Adapter.observe
    monkeypatch.setattr(Adapter, "observe", lambda self, state: [*grow(self, state)[:1], [1, 2]])
    policy = agents.init(settings, world.sizes).policy
    with pytest.raises(TrainingError) as stopped:
        collecting(world, settings)(policy, state._replace(epoch=jnp.int32(3)))
    said = "the world old, epoch 3: agent 1 got an observation of shape (2,), not (3,); repair the"
    assert str(stopped.value).startswith(said)


class Broken(MatchTheSign):
    """One agent gets NaN."""

    def step(self, state, actions, key):
        state, reward, done = super().step(state, actions, key)
        return state, reward.at[1].set(jnp.nan), done


def test_numbers_that_are_not_finite_stay_with_their_agent(signs):
    _, [_, rollout], [_, episodes] = played(Broken("match_the_sign", 3), config())
    _, [_, healthy], [_, fine] = signs["simultaneous"]
    assert np.isnan(rollout.reward[1]).all()
    for agent in (0, 2):
        assert np.array_equal(rollout.reward[agent], healthy.reward[agent])
        assert float(episodes.total_return[agent]) == float(fine.total_return[agent])


def test_the_shapes_of_experience_are_known_before(signs):
    _, [rollout, _], [episodes, _] = signs["simultaneous"]
    found = jax.eval_shape(lambda: (rollout, episodes))
    assert found == experience_like(MatchTheSign("match_the_sign", 3).sizes, config())


class AtOnce:
    """A world without turns, whose verbs can be replaced."""

    name, sizes = "at_once", Sizes((2, 2), (2, 2))

    def reset(self, key):
        return jnp.zeros(2)

    def observe(self, state):
        return jnp.zeros((2, 2))

    def step(self, state, actions, key):
        return state, jnp.zeros(2), jnp.bool_(False)


def test_turns_are_refused_where_all_agents_act_at_once():
    with pytest.raises(
        ConfigError, match=r"--turns sequential: .* at_once act at once; set --turns"
    ):
        begin(AtOnce(), config(turns="sequential"), KEY)


@pytest.mark.parametrize(
    ("verb", "returns", "said"),
    [
        ("observe", jnp.zeros((2, 3)), r"\(observe\) returns shape \(2, 3\), not \(2, 2\)"),
        ("step", (jnp.zeros(2), jnp.zeros(3), True), r"\(step, rewards\) returns shape \(3,\)"),
        (
            "step",
            (jnp.zeros(2), jnp.zeros(2), jnp.ones(5)),
            r"\(step, done\) .* \(5,\), not \(2,\)",
        ),
        ("step", (jnp.zeros(3), jnp.zeros(2), True), r"\(step, the state\)"),
    ],
    ids=["observation", "rewards", "done", "state"],
)
def test_wrong_shapes_are_refused_before_anything_runs(monkeypatch, verb, returns, said):
    monkeypatch.setattr(AtOnce, verb, lambda self, *_: jax.tree.map(jnp.asarray, returns))
    with pytest.raises(ConfigError, match=f"the world at_once {said}.*; repair the world"):
        begin(AtOnce(), config(), KEY)


ODD = st.one_of(
    st.none(),
    st.floats(),
    arrays(
        np.float32, array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3), fill=st.just(0)
    ),
    st.lists(st.lists(st.just(0.0), max_size=2), min_size=2, max_size=2),
)


@given(st.sampled_from(["rewards", "done"]), ODD)
@example_settings(max_examples=40)
def test_a_called_world_that_returns_other_shapes_is_named(part, value):
    right = {"rewards": (np.zeros(2), [0.0, 0.0]), "done": (False, np.zeros(2, bool))}
    assume(not any(shape_of(value) == np.shape(each) for each in right[part]))

    class Odd(AtOnce):
        def step(self, state, actions, key):
            rewards, done = np.zeros(2), False
            return (state, value, done) if part == "rewards" else (state, rewards, value)

    with pytest.raises(TrainingError, match=f"the world at_once, epoch 0: step returns {part} of"):
        play_once(Odd())


def play_once(world):
    """A turn of a called world in which all agents take action 0."""
    settings = config(acting="call", num_envs=1, num_steps=1)
    nothing = np.zeros((2, 1), np.int32)
    act = lambda _, obs, key: (nothing, nothing, nothing)  # noqa: E731
    return collect(world, settings, None, begin(world, settings, KEY), act=act)


def shape_of(value):
    try:
        return np.shape(value)
    except ValueError:
        return None


@pytest.mark.parametrize("returned", [None, 3, (1, 2), [1, 2, 3]])
def test_a_called_world_that_returns_something_else_is_named(monkeypatch, returned):
    monkeypatch.setattr(AtOnce, "step", lambda *_: returned)
    with pytest.raises(TrainingError, match="step is to return the state and rewards and done"):
        play_once(AtOnce())


def test_a_world_that_jax_cannot_trace_names_the_flag(monkeypatch):
    monkeypatch.setattr(AtOnce, "step", lambda *given: (given[1], np.zeros(2) + given[2], False))
    monkeypatch.setattr(AtOnce, "observe", lambda self, state: np.asarray(state))
    with pytest.raises(ConfigError, match=r"--world at_once cannot be traced .* --acting call if"):
        begin(AtOnce(), config(), KEY)
