from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flowrl.multiagent import agents
from flowrl.multiagent.config import PER_AGENT
from flowrl.multiagent.world import Sizes
from tests.multiagent.making import CONFIGS, KEY, SIZES, actor, collected, learner, rollout, same

SPREAD = "MPE_simple_spread_v3"
MIXED = Sizes((4, 2, 3), (3, 2, 2))  # as wide as SIZES, so that programs are shared


def taken(tree, chosen):
    """Leaves of these agents, in this order."""
    return jax.tree.map(lambda leaf: leaf[np.asarray(chosen)], tree)


@pytest.mark.parametrize("algorithm", CONFIGS)
def test_all_agents_move_and_stay_alive(algorithm):
    config = CONFIGS[algorithm]
    before = agents.init(config, SIZES)
    after, figures = learner(config)(before, rollout(), KEY)
    moved = [
        (old != new).any(axis=tuple(range(1, old.ndim)))
        for old, new in zip(
            jax.tree.leaves(before.policy.network),
            jax.tree.leaves(after.policy.network),
            strict=True,
        )
    ]
    assert jnp.stack(moved).any(axis=0).all()
    assert after.alive.all()
    assert after.epoch.tolist() == [1, 1, 1]
    assert figures["loss"].shape == (3,)


@pytest.fixture(params=["only_apple", pytest.param(SPREAD, marks=pytest.mark.slow)])
def epochs(algorithm, request):
    """Three agents, and what they have met in two epochs in a world in which they interact."""
    return collected(algorithm, request.param)


@pytest.mark.parametrize("algorithm", CONFIGS)
@pytest.mark.parametrize("filling", ["another epoch", "nan"])
def test_another_agents_rollout_changes_no_bit_of_the_others(algorithm, epochs, filling):
    before, turns, later = epochs
    if filling == "nan":
        names = "obs", "reward", "last_obs"
        bad = {name: jnp.full_like(getattr(turns, name), jnp.nan) for name in names}
        later = turns._replace(**bad)
    other = jax.tree.map(lambda leaf, new: leaf.at[1].set(new[1]), turns, later)
    learn = learner(CONFIGS[algorithm])
    wanted, found = learn(before, turns, KEY), learn(before, other, KEY)
    assert same(taken(found, [0, 2]), taken(wanted, [0, 2]))
    assert not same(taken(found, [1]), taken(wanted, [1]))
    assert found[0].alive[1] == (filling != "nan")


@pytest.mark.parametrize("algorithm", CONFIGS)
def test_an_agent_whose_loss_is_not_finite_is_frozen_as_it_was(algorithm):
    config, turns = CONFIGS[algorithm], rollout()
    learn, before = learner(config), agents.init(config, SIZES)
    turns = turns._replace(reward=turns.reward.at[1].set(jnp.inf))
    after, _ = learn(before, turns, KEY)
    assert after.alive.tolist() == [True, False, True]
    assert same(taken(after.policy.network, [1]), taken(before.policy.network, [1]))
    again, _ = learn(after, rollout(seed=1), KEY)
    assert again.alive.tolist() == [True, False, True]
    assert same(taken(again.opt_state, [1]), taken(before.opt_state, [1]))


@pytest.mark.parametrize("algorithm", CONFIGS)
def test_agents_in_another_order_give_the_same_in_that_order(algorithm):
    config, turns, order = CONFIGS[algorithm], rollout(), [2, 0, 1]
    learn, before = learner(config), agents.init(config, SIZES)
    wanted = learn(before, turns, KEY)
    assert same(learn(taken(before, order), taken(turns, order), KEY), taken(wanted, order))
    acted = actor(config)(before.policy, turns.obs[:, 0], KEY)
    swapped = actor(config)(taken(before.policy, order), taken(turns.obs[:, 0], order), KEY)
    assert same(swapped, taken(acted, order))


@pytest.mark.parametrize("algorithm", CONFIGS)
def test_other_parameters_of_an_agent_change_no_bit_of_the_others(algorithm, epochs):
    learn, (before, turns, _) = learner(CONFIGS[algorithm]), epochs
    network = jax.tree.map(lambda leaf: leaf.at[1].multiply(1.5), before.policy.network)
    other = before._replace(policy=before.policy._replace(network=network))
    wanted, found = learn(before, turns, KEY), learn(other, turns, KEY)
    assert same(taken(found, [0, 2]), taken(wanted, [0, 2]))
    assert found[1]["loss"][1] != wanted[1]["loss"][1]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", CONFIGS)
def test_a_loss_depends_on_its_own_agents_parameters_alone(algorithm, epochs):
    config, (before, turns, _) = CONFIGS[algorithm], epochs
    # An input that is always 0 has no gradient, and Adam's root no derivative at 0.
    turns = turns._replace(obs=turns.obs + 0.01)

    def losses(network):
        """Mean over the gradient steps; the second begins with the parameters after the first."""
        policy = before.policy._replace(network=network)
        return agents.learn(config, before._replace(policy=policy), turns, KEY)[1]["loss"]

    for leaf in jax.tree.leaves(jax.jit(jax.jacrev(losses))(before.policy.network)):
        assert np.isfinite(leaf).all()
        depends = np.asarray(leaf != 0).reshape(3, 3, -1).any(-1)  # loss i, parameters j
        np.testing.assert_array_equal(depends, np.eye(3, dtype=bool))


@pytest.mark.parametrize("algorithm", CONFIGS)
def test_agents_in_one_program_are_as_each_alone_in_its_own(algorithm):
    config, turns = CONFIGS[algorithm], rollout(MIXED)
    before = agents.init(config, MIXED)
    wanted, figures = learner(config)(before, turns, KEY)
    for agent in range(3):
        one, alone_figures = learner(config)(taken(before, [agent]), taken(turns, [agent]), KEY)
        np.testing.assert_allclose(alone_figures["loss"][0], figures["loss"][agent], rtol=1e-5)
        for found, leaf in zip(jax.tree.leaves(one), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(found[0], leaf[agent], rtol=1e-5, atol=1e-6)


def test_an_agent_is_padded_with_zeros_that_stay_zeros():
    config = CONFIGS["ppo"]
    narrow = Sizes((4, 2), (3, 2))
    before = agents.init(config, MIXED)
    after, _ = learner(config)(before, rollout(MIXED), KEY)
    for stage in (before, after):
        network = taken(stage.policy.network, 1)
        assert (network.first.kernel[2:] == 0).all()
        assert (network.actor[-1].kernel[:, 2:] == 0).all()
        assert network.actor[-1].bias[2] == 0
    own = agents.init(config, narrow).policy.network
    np.testing.assert_array_equal(
        own.first.kernel[1, :2], before.policy.network.first.kernel[1, :2]
    )


@pytest.mark.parametrize("algorithm", CONFIGS)
def test_an_action_that_an_agent_lacks_is_never_taken(algorithm):
    policy = agents.init(CONFIGS[algorithm], MIXED).policy
    obs = jnp.asarray(np.random.default_rng(0).normal(size=(3, 3000, 4)), jnp.float32)
    action, log_prob, value = actor(CONFIGS[algorithm])(policy, obs, KEY)
    assert [len(set(each.tolist())) for each in action] == [3, 2, 2]
    assert (action < np.asarray(MIXED.actions)[:, None]).all()
    assert np.isfinite(log_prob).all()
    assert np.isfinite(value).all()


@pytest.mark.parametrize("algorithm", CONFIGS)
def test_one_call_for_all_agents_acts_as_one_call_for_each(algorithm):
    policy, act = agents.init(CONFIGS[algorithm], SIZES).policy, actor(CONFIGS[algorithm])
    obs = rollout().obs[:, 0]
    wanted = act(policy, obs, KEY)[0]
    alone = [act(taken(policy, [agent]), obs[agent : agent + 1], KEY)[0] for agent in range(3)]
    np.testing.assert_array_equal(jnp.concatenate(alone), wanted)


@pytest.mark.parametrize("name", PER_AGENT)
def test_a_number_of_one_agent_is_its_own(name):
    config = CONFIGS["ppo"]
    wanted, _ = learner(config)(agents.init(config, SIZES), rollout(), KEY)
    (usual,) = getattr(config, name)
    other = agents.init(replace(config, **{name: (usual, usual / 2, usual)}), SIZES)
    found, _ = learner(config)(other, rollout(), KEY)
    networks = found.policy.network, wanted.policy.network
    assert same(*(taken(network, [0, 2]) for network in networks))
    assert not same(*(taken(network, [1]) for network in networks))


def test_advantages_and_targets_are_those_of_a_loop_over_turns():
    hyper = taken(agents.init(CONFIGS["ppo"], SIZES).hyper, 0)._replace(gamma=0.9, gae_lambda=0.8)
    turns = taken(rollout(), 0)
    done = np.asarray(turns.done)
    assert done.any()
    value = np.concatenate([turns.value, turns.last_value[None]])
    wanted, following = np.zeros(done.shape), np.zeros(done.shape[1])
    for turn in reversed(range(len(done))):
        goes_on = 1 - done[turn]
        error = turns.reward[turn] + 0.9 * goes_on * value[turn + 1] - value[turn]
        wanted[turn] = following = error + 0.9 * 0.8 * goes_on * following
    rows = agents._rows(hyper, turns)
    np.testing.assert_allclose(rows.target, (wanted + turns.value).ravel(), rtol=1e-5, atol=1e-6)
    normalised = ((wanted - wanted.mean()) / wanted.std()).ravel()
    np.testing.assert_allclose(rows.advantage, normalised, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(rows.action, np.asarray(turns.action).ravel())


def test_a_seed_gives_other_networks_and_an_agent_another_than_the_next():
    one = agents.init(CONFIGS["ppo"], SIZES).policy.network.first.kernel
    other = agents.init(replace(CONFIGS["ppo"], seed=1), SIZES).policy.network.first.kernel
    assert (one != other).any((1, 2)).all()
    assert (one[0] != one[1]).any()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"num_minibatches": 5}, "--num_envs 6 × --num_steps 4 = 24 rows"),
        ({"capacity": 7}, "--capacity 7 is below --batch_size 8; choose 8 or more"),
    ],
    ids=["rows", "capacity"],
)
def test_numbers_that_do_not_fit_are_refused(changes, told):
    problems = list(replace(CONFIGS["dqn"], **changes).problems())
    assert len(problems) == 1
    assert problems[0].startswith(told)
