"""A potential shapes rewards, and the best policy stays the same under any potential."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flowrl.ppo import gae
from tests.ppo import tiny_envs
from tests.ppo.test_learning import CONFIG, GAMMA, judged, trained


class Tempted(tiny_envs.TinyEnv):
    """Two steps: the first action is seen in the second, which earns 1 if it was 0."""

    lengths = (2,)

    def step(self, key, state, actions):
        tempted = state._replace(sight=jnp.where(state.length == 0, actions, 0).astype(jnp.float32))
        earned = jnp.where(state.length == 1, state.sight == 0, 0.0)
        _, after, output = super().step(key, tempted, actions)
        after = after._replace(sight=jnp.where(output.done, 0.0, tempted.sight))
        return self.observe(after), after, output._replace(reward=earned.astype(jnp.float32))

    def earned(self, state, action):
        return jnp.zeros(action.shape)


# Of each environment: observations, and the probability that the best policy takes action 1.
BEST = {
    tiny_envs.Chosen: {(0, 0): 1},
    tiny_envs.Matched: {(1, 0): 1, (-1, 0): 0},
    Tempted: {(0, 0): 0},
    tiny_envs.Relay: {(0, 0): 0, (0, 1): 0},
    tiny_envs.Steady: {(1, 0): 1, (-1, 0): 0},
}
EXPERT = {tiny_envs.Relay: 2}
POTENTIALS = {
    "adversarial": lambda state: 2.0 * state.sight - 1.0 * state.length,
    "the reverse": lambda state: -3.0 * state.sight,
    "random": lambda state: jax.random.normal(jax.random.key(7), (64,))[
        (4 * state.length + 16 * state.sight).astype(jnp.int32)
    ],
}


def shaped(kind, potential):
    class Shaped(kind):
        def potential(self, state):
            return jnp.where(state.length == 0, 0.0, potential(state)) + 0.0 * state.total

    return Shaped()


def quick(env, name):
    wanted = (Tempted, "adversarial")
    return () if (env, name) == wanted else pytest.mark.slow


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(kind, name, marks=quick(kind, name), id=f"{kind.__name__}, {name}")
        for kind in BEST
        for name in POTENTIALS
    ],
)
def test_the_best_policy_is_learnt_under_any_potential(kind, name):
    config = replace(CONFIG, success_state_rate=1.0, gae_lambda=0.95)
    turn = trained(shaped(kind, POTENTIALS[name]), config)
    found, _ = judged(turn, EXPERT.get(kind, 0), *BEST[kind])
    np.testing.assert_allclose(found, list(BEST[kind].values()), atol=0.25)


@pytest.mark.slow
def test_a_reward_for_the_tempting_state_would_change_the_policy():
    class Rewarded(Tempted):
        def step(self, key, state, actions):
            obs, after, output = super().step(key, state, actions)
            return obs, after, output._replace(reward=output.reward + 2.0 * after.sight)

    assert judged(trained(Rewarded()), 0, (0, 0))[0] > 0.9


@pytest.mark.parametrize("seed", range(20))
def test_potentials_are_worth_what_their_differences_would_add_to_rewards(seed):
    random = np.random.default_rng(seed)
    reward, value, potential = random.normal(size=(3, 12, 4)).astype(np.float32)
    boundary = random.random((12, 4)) < 0.3
    last_value, last_potential = random.normal(size=(2, 4)).astype(np.float32)
    potential[1:][boundary[:-1]] = 0
    following = np.where(boundary, 0, np.vstack([potential[1:], last_potential]))
    common = {"boundaries": boundary, "gamma": GAMMA, "lam": 0.9}
    by_reward = gae.advantages(
        reward + GAMMA * following - potential, value, last_value=last_value, **common
    )
    by_value = gae.advantages(
        reward, value + potential, last_value=last_value + last_potential, **common
    )
    np.testing.assert_allclose(by_reward, by_value, atol=1e-5)
