from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flowrl.config import PPOConfig
from flowrl.errors import TrainingError
from flowrl.networks import dispatch
from flowrl.networks.grouped import pack
from flowrl.networks.moe import ActorCritic
from flowrl.ppo import optimizer
from flowrl.ppo.loop import (
    Counters,
    frames_per_update,
    learning_rate,
    num_updates,
    settled,
    start,
    train,
)
from flowrl.ppo.programs import begin_programs
from flowrl.ppo.update import TrainState
from tests.networks.making import init_experts
from tests.ppo import tiny_envs

GAMMA = 0.5
CONFIG = PPOConfig(
    total_timesteps=40 * 512,
    success_state_rate=0.95,
    lr=5e-3,
    num_envs=32,
    num_steps=16,
    num_minibatches=4,
    layer_size=16,
    gamma=GAMMA,
    gae_lambda=0.8,
    ent_coef=0.0,
)


def fresh_params(env):
    network = ActorCritic(env.num_actions, CONFIG.layer_size)
    sizes = {"observation_size": env.observation_size, "num_experts": env.num_experts}
    return pack(init_experts(network, jax.random.key(0), **sizes))


def turns(env, config=CONFIG):
    params, programs = fresh_params(env), begin_programs(env, config)
    learner = start(
        env,
        config,
        programs,
        train=TrainState(params, optimizer.init(params)),
        key=jax.random.key(1),
    )
    counters = Counters(acted=(0,) * env.num_experts)
    return train(env, config, programs, learner=learner, counters=counters)


def trained(env, config=CONFIG):
    *_, last = turns(env, config)
    return last


def judged(turn, expert: int, *observations):
    """Probability of action 1, and value, at each observation."""
    obs = jnp.asarray(observations, jnp.float32)
    rows = jnp.full(len(observations), expert, jnp.int32)
    params = turn.learner.train.params
    logits, value = dispatch.apply(params, obs, rows, activation="tanh", method="dense")
    return np.asarray(jax.nn.softmax(logits)[:, 1]), np.asarray(value)


def test_a_constant_reward_is_valued():
    _, value = judged(trained(tiny_envs.Constant()), 0, (0, 0))
    np.testing.assert_allclose(value, [1.0], atol=0.1)


def test_what_is_seen_is_valued():
    _, value = judged(trained(tiny_envs.Seen()), 0, (1, 0), (-1, 0))
    np.testing.assert_allclose(value, [1.0, -1.0], atol=0.1)


def test_a_delayed_reward_is_discounted_once_per_step():
    _, value = judged(trained(tiny_envs.Delayed()), 0, (0, 0), (0, 1))
    np.testing.assert_allclose(value, [GAMMA, 1.0], atol=0.1)


def test_the_rewarded_action_is_learnt_and_training_stops_early():
    turn = trained(tiny_envs.Chosen())
    assert turn.reached
    assert turn.rates.success >= 0.95
    assert turn.counters.updates < num_updates(CONFIG)
    assert judged(turn, 0, (0, 0))[0] > 0.9


def test_the_action_that_matches_what_is_seen_is_learnt():
    turn = trained(tiny_envs.Matched())
    assert turn.reached
    seen_plus, seen_minus = judged(turn, 0, (1, 0), (-1, 0))[0]
    assert seen_plus > 0.85
    assert seen_minus < 0.15


def test_two_experts_learn_their_own_tasks_and_a_third_stays_as_it_was():
    env = tiny_envs.Relay()
    turn = trained(env, replace(CONFIG, gae_lambda=1.0))
    first, first_value = judged(turn, 2, (0, 0), (0, 1))
    second, second_value = judged(turn, 0, (0, 2), (0, 3))
    assert (first < 0.1).all()
    assert (second > 0.9).all()
    np.testing.assert_allclose(first_value, [1 + GAMMA, 1.0], atol=0.25)
    np.testing.assert_allclose(second_value, [10 + 10 * GAMMA, 10.0], atol=1.5)
    pairs = zip(
        jax.tree.leaves(turn.learner.train.params), jax.tree.leaves(fresh_params(env)), strict=True
    )
    assert all((np.asarray(found[1]) == np.asarray(was[1])).all() for found, was in pairs)


def test_each_of_64_experts_learns_its_own_task():
    config = replace(CONFIG, num_envs=16, num_steps=64, total_timesteps=6 * 16 * 64)
    turn = trained(tiny_envs.Procession(), config)
    assert turn.counters.acted == (6 * 16,) * 64
    odd = [judged(turn, expert, (0, expert))[0].item() for expert in range(64)]
    assert max(odd[::2]) < 0.2
    assert min(odd[1::2]) > 0.8


def test_acted_frames_are_exact():
    config = replace(CONFIG, total_timesteps=3 * 512 - 7)
    counters = trained(tiny_envs.Relay(), config).counters
    assert counters.updates == 3  # the fewest that take total_timesteps
    assert counters.frames == 3 * 512
    assert counters.acted == (768, 0, 768)


def test_the_same_seed_trains_the_same_parameters():
    config = replace(CONFIG, total_timesteps=3 * 512)
    one, other = (trained(tiny_envs.Relay(), config).learner.train.params for _ in range(2))
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    assert all((left == right).all() for left, right in pairs)


def test_a_loss_that_is_no_number_ends_training_and_names_the_update():
    with pytest.raises(TrainingError, match=r"update 1 of 40 left the loss at nan.*--lr"):
        list(turns(tiny_envs.Broken()))


def test_an_expert_settles_by_its_frames():
    config = replace(CONFIG, settled_frames=1000)
    assert settled(config, np.array([0, 1000, 3000])).tolist() == [1.0, 0.5, 0.25]
    assert settled(replace(CONFIG, settled_frames=0), np.array([0, 10**9])).tolist() == [1.0, 1.0]


def test_the_learning_rate_falls_over_the_schedule_if_that_is_longer():
    frames = frames_per_update(CONFIG)
    short = replace(CONFIG, total_timesteps=10 * frames)
    rung = replace(short, schedule_timesteps=40 * frames)
    whole = replace(CONFIG, total_timesteps=40 * frames)
    assert [learning_rate(rung, n) for n in range(10)] == [
        learning_rate(whole, n) for n in range(10)
    ]
    assert learning_rate(short, 9) < learning_rate(rung, 9)
    assert learning_rate(short, 9) == learning_rate(replace(short, schedule_timesteps=1), 9)
    of_two = replace(rung, replicas=2).of_replica()
    assert learning_rate(of_two, 5) == learning_rate(rung, 5)
