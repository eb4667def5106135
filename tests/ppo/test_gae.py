from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from flowrl.ppo.gae import advantages, normalised


def reference(rewards, values, boundaries, last_value, gamma, lam):
    """The definition: a discounted sum of errors up to the first boundary."""
    steps, envs = rewards.shape
    found = np.zeros((steps, envs))
    nexts = np.vstack([values[1:], last_value])
    for t in range(steps):
        for b in range(envs):
            weight = 1.0
            for k in range(t, steps):
                goes_on = not boundaries[k, b]
                delta = rewards[k, b] + gamma * nexts[k, b] * goes_on - values[k, b]
                found[t, b] += weight * delta
                weight *= gamma * lam
                if not goes_on:
                    break
    return found


@pytest.mark.parametrize("share", [0.0, 0.2, 1.0], ids=["none", "some", "all"])
@pytest.mark.parametrize("lam", [0.0, 0.9, 1.0])
def test_advantages_are_the_definition_s_sum_up_to_the_boundary(share, lam):
    rng = np.random.default_rng(3)
    rewards, values = rng.normal(size=(2, 13, 4)).astype(np.float32)
    boundaries = rng.random((13, 4)) < share
    last_value = rng.normal(size=4).astype(np.float32)
    found = advantages(
        jnp.asarray(rewards),
        jnp.asarray(values),
        boundaries=jnp.asarray(boundaries),
        last_value=jnp.asarray(last_value),
        gamma=0.97,
        lam=lam,
    )
    wanted = reference(rewards, values, boundaries, last_value, 0.97, lam)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_what_comes_after_a_boundary_does_not_matter():
    rewards = jnp.ones((6, 1))
    values = jnp.zeros((6, 1))
    boundaries = jnp.zeros((6, 1), bool).at[2].set(True)
    common = {"boundaries": boundaries, "last_value": jnp.zeros(1), "gamma": 0.9, "lam": 0.9}
    before = advantages(rewards, values, **common)
    after = advantages(rewards.at[3:].set(1e6), values.at[3:].set(-1e6), **common)
    np.testing.assert_array_equal(before[:3], after[:3])
    assert not np.allclose(before[3:], after[3:])


def test_advantages_are_normalised_among_the_rows_of_each_expert():
    expert = jnp.asarray([0, 0, 0, 2, 2, 3])
    found = normalised(jnp.asarray([1.0, 2.0, 3.0, 1000.0, 3000.0, 7.0]), expert, num_experts=4)
    half = np.sqrt(1.5)
    np.testing.assert_allclose(found, [-half, 0.0, half, -1.0, 1.0, 0.0], atol=1e-5)
