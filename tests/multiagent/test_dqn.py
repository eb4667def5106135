from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from flowrl.multiagent import agents, buffers, dqn
from flowrl.networks.moe import take_expert
from tests.multiagent.making import CONFIGS, SIZES, learner, rollout

CONFIG = CONFIGS["dqn"]
Q = jax.jit(partial(dqn.q_values, activation="tanh"))
MASK = jnp.asarray([True, True, False])


def one_network():
    return take_expert(agents.init(CONFIG, SIZES).policy.network, 0)


def steps():
    one = jax.tree.map(lambda leaf: leaf[0], rollout())
    return buffers.transitions(one._replace(action=one.action % 2))


def test_an_action_that_is_not_there_is_worth_nothing_and_counts_nowhere():
    obs = steps().obs
    q = Q(one_network(), obs, MASK)
    whole = Q(one_network(), obs, jnp.ones(3, bool))
    assert (q[:, 2] == dqn.MASKED).all()
    np.testing.assert_allclose(q[:, 0] - q[:, 1], whole[:, 0] - whole[:, 1], atol=1e-6)
    _, value = dqn.forward(one_network(), obs, activation="tanh")
    np.testing.assert_allclose(q[:, :2].mean(-1), value, atol=1e-6)


def test_random_actions_are_as_many_as_asked_and_all_there():
    q = jnp.broadcast_to(jnp.asarray([1.0, 0.0, dqn.MASKED]), (4000, 3))
    key = jax.random.key(1)
    assert (dqn.explore(q, MASK, 0.0, key) == 0).all()
    counts = np.bincount(dqn.explore(q, MASK, 0.5, key), minlength=3)
    assert counts[2] == 0
    assert abs(counts[1] - 1000) < 5 * np.sqrt(750)


def test_the_loss_is_the_error_against_reward_and_the_targets_best_action():
    rows, target = steps(), take_expert(agents.init(CONFIG, SIZES).policy.network, 1)
    told = {"mask": MASK, "gamma": 0.9, "activation": "tanh"}
    loss, figures = dqn.dqn_loss(one_network(), target, rows, **told)
    q = np.asarray(Q(one_network(), rows.obs, MASK))
    best = np.asarray(Q(target, rows.next_obs, MASK)).max(-1)
    wanted = np.where(rows.done, rows.reward, rows.reward + 0.9 * best)
    chosen = q[np.arange(len(q)), rows.action]
    np.testing.assert_allclose(loss, 0.5 * np.mean((chosen - wanted) ** 2), rtol=1e-5)
    np.testing.assert_allclose(figures["value"], chosen.mean(), rtol=1e-5)


def test_the_target_network_follows_the_network_slowly():
    before = agents.init(CONFIG, SIZES)
    after, _ = learner(CONFIG)(before, rollout(), jax.random.key(0))

    def apart(one, other):
        gaps = jax.tree.map(lambda one, other: np.abs(np.asarray(one) - other).sum(), one, other)
        return sum(jax.tree.leaves(gaps))

    network = after.policy.network
    assert 0 < apart(after.target, before.target) < 0.1 * apart(network, before.policy.network)


def test_epochs_between_two_trainings_only_fill_the_buffer():
    config = replace(CONFIG, train_interval=2, update_epochs=1, num_minibatches=1)
    learn, key = learner(config), jax.random.key(0)
    before = agents.init(config, SIZES)
    first, figures = learn(before, rollout(), key)
    assert np.isnan(figures["loss"]).all()
    assert first.ring.size.tolist() == [24, 24, 24]
    kernels = [each.policy.network.first.kernel for each in (before, first)]
    np.testing.assert_array_equal(*kernels)
    assert (first.policy.epsilon < before.policy.epsilon).all()
    second, figures = learn(first, rollout(seed=1), key)
    assert np.isfinite(figures["loss"]).all()
    assert second.ring.size.tolist() == [48, 48, 48]
    assert (second.policy.network.first.kernel != kernels[0]).any()
