from __future__ import annotations

import os
from dataclasses import replace

import jax
import numpy as np
import pytest

from flowrl.config import PPOConfig
from flowrl.networks import dispatch
from flowrl.networks.grouped import pack
from flowrl.networks.moe import ActorCritic
from flowrl.ppo import optimizer
from flowrl.ppo.loop import Counters, start, train
from flowrl.ppo.loss import Hyperparameters
from flowrl.ppo.programs import begin_programs
from flowrl.ppo.rollout import RolloutState, rollout
from flowrl.ppo.sharding import num_shards, shard_size, with_shards
from flowrl.ppo.update import TrainState
from tests.networks.making import init_experts
from tests.ppo.tiny_envs import Relay

CONFIG = PPOConfig(
    total_timesteps=3 * 8 * 6,
    success_state_rate=1.0,
    num_envs=8,
    num_steps=6,
    update_epochs=1,
    num_minibatches=1,
    layer_size=4,
)
IN_PAIRS = replace(CONFIG, acting_threads=4)
ON = np.zeros(1, np.int32)  # no wish to stop
RATES = np.full(3, CONFIG.lr)


def learner_of(env: Relay, config: PPOConfig):
    network, key = ActorCritic(2, 4), jax.random.key(0)
    params = pack(init_experts(network, key, observation_size=2, num_experts=3))
    state = TrainState(params, optimizer.init(params))
    programs = begin_programs(env, config)
    return start(env, config, programs, train=state, key=jax.random.key(1))


def test_threads_step_the_shards_as_one_thread_would_step_one_after_another():
    env = Relay()
    programs = begin_programs(env, IN_PAIRS)
    state, shards = learner_of(env, IN_PAIRS)
    acted = tuple(programs.act(programs.pad(state.params), shard)[1] for shard in shards)
    (expected, _), _ = programs.learn(state, acted, Hyperparameters.of(IN_PAIRS, RATES), ON)
    updates = train(
        env,
        replace(IN_PAIRS, anneal_lr=False),
        programs,
        learner=learner_of(env, IN_PAIRS),
        counters=Counters(acted=(0, 0, 0)),
    )
    found = next(updates).learner
    assert len(found.shards) == 4
    params = found.train.params
    for one, other in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        assert np.array_equal(one, other)


def test_shards_see_worlds_and_draw_actions_of_their_own():
    env = Relay()
    programs = begin_programs(env, IN_PAIRS)
    state, shards = learner_of(env, IN_PAIRS)
    steps = [programs.act(programs.pad(state.params), shard)[1].steps for shard in shards]
    drawn = {np.asarray(step.action).tobytes() for step in steps}
    assert len(drawn) == 4


def test_learning_does_not_ask_how_rows_are_split_into_shards():
    env = Relay()
    whole = begin_programs(env, CONFIG)
    state, (shard,) = learner_of(env, CONFIG)
    acted = whole.act(whole.pad(state.params), shard)[1]
    parts = tuple(
        acted._replace(
            steps=jax.tree.map(lambda leaf, k=k: leaf[:, 2 * k : 2 * k + 2], acted.steps),
            last_value=acted.last_value[2 * k : 2 * k + 2],
        )
        for k in range(4)
    )
    hyper = Hyperparameters.of(CONFIG, RATES)
    in_parts = begin_programs(env, IN_PAIRS)
    (expected, _), stats = whole.learn(state, (acted,), hyper, ON)
    state, _ = learner_of(env, CONFIG)
    (found, _), of_parts = in_parts.learn(state, parts, hyper, ON)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    assert np.array_equal(of_parts.done, stats.done)
    assert np.array_equal(of_parts.episode_return, stats.episode_return)
    assert np.array_equal(of_parts.acted, stats.acted)


@pytest.mark.parametrize(
    ("num_envs", "cpus", "threads"),
    [(64, 1, 1), (64, 2, 2), (64, 8, 2), (96, 4, 3), (256, 4, 4), (63, 4, 1), (8, 2, 1)],
)
def test_there_is_a_thread_for_each_cpu_while_each_has_enough_to_do(
    monkeypatch, num_envs, cpus, threads
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cpus)))
    config = with_shards(PPOConfig(num_envs=num_envs))
    assert num_shards(config) == threads
    assert shard_size(config) * threads == num_envs


def test_what_was_asked_for_stays(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert num_shards(with_shards(PPOConfig(num_envs=64, acting_threads=16))) == 16


def test_a_gpu_steps_all_environments_at_once(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    assert num_shards(with_shards(PPOConfig(num_envs=1024))) == 1


class Turned(Relay):
    """Takes the other one of two actions, and pays the number of what it takes."""

    def action_of(self, state, choice):
        return 1 - choice

    def earned(self, state, actions):
        return actions


def test_the_game_takes_the_turned_action_and_the_choice_is_learnt_from():
    env = Turned()
    experts = init_experts(ActorCritic(2, 4), jax.random.key(0), observation_size=2, num_experts=3)
    packed, key = pack(experts), jax.random.key(1)
    obs, begun = env.reset(key, 8)
    _, batch = rollout(env, CONFIG, packed, RolloutState(begun, obs, key))
    steps = batch.steps
    assert 0 < steps.action.mean() < 1
    np.testing.assert_array_equal(steps.output.reward, 1 - steps.action)
    rows = steps.obs.reshape(-1, 2), steps.output.expert.ravel()
    logits, _ = dispatch.apply(packed, *rows, activation=CONFIG.activation)
    chances = jax.nn.log_softmax(logits)[np.arange(len(logits)), steps.action.ravel()]
    np.testing.assert_allclose(steps.log_prob.ravel(), chances, rtol=1e-5)
