from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flowrl.multiagent import agents
from tests.multiagent.making import CONFIGS, SIZES, actor, learner, rollout

KEY = jax.random.key(7)


def same(found, wanted) -> bool:
    """Whether two trees are equal bit for bit."""
    leaves = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    return all(np.array_equal(one, two, equal_nan=True) for one, two in leaves)


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


@pytest.mark.parametrize("algorithm", CONFIGS)
@pytest.mark.parametrize("filling", [3.0, jnp.nan], ids=["other", "nan"])
def test_another_agents_rollout_changes_no_bit_of_the_others(algorithm, filling):
    config, turns = CONFIGS[algorithm], rollout()
    learn, before = learner(config), agents.init(config, SIZES)
    other = turns._replace(obs=turns.obs.at[1].set(filling), reward=turns.reward.at[1].set(filling))
    wanted, found = learn(before, turns, KEY), learn(before, other, KEY)
    assert same(taken(found, [0, 2]), taken(wanted, [0, 2]))
    assert not same(found, wanted)


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
