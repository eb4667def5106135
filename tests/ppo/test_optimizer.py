from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax

from flowrl.config import PPOConfig
from flowrl.ppo import optimizer
from flowrl.ppo.loss import Hyperparameters

HYPER = Hyperparameters.of(PPOConfig(max_grad_norm=0.5), 0.1)


def stepped(rows_per_step, grads, num_experts=3, hyper=HYPER):
    params = {"w": jnp.arange(num_experts * 4.0).reshape(num_experts, 4)}
    state = optimizer.init(params)
    for rows in rows_per_step:
        params, state = optimizer.step(
            hyper,
            params=params,
            state=state,
            grads={"w": grads},
            rows=jnp.asarray(rows),
        )
    return params, state


def test_each_expert_moves_at_its_own_rate_bit_for_bit():
    grads = jax.random.normal(jax.random.key(1), (3, 4))
    rates = np.array([0.1, 0.05, 0.0], np.float32)

    def moved(lr) -> jax.Array:
        return stepped([[5, 5, 5]] * 3, grads, hyper=HYPER._replace(lr=lr))[0]["w"]

    together, equal = moved(rates), moved(np.full(3, 0.1, np.float32))
    for expert, rate in enumerate(rates):
        np.testing.assert_array_equal(together[expert], moved(rate)[expert])
    np.testing.assert_array_equal(equal, moved(np.float32(0.1)))


def test_an_expert_without_rows_stays_as_it_was_in_spite_of_its_momentum():
    grads = jnp.ones((3, 4))
    before, state_before = stepped([[5, 5, 5]], grads)
    after, state_after = stepped([[5, 5, 5], [5, 0, 1], [1, 0, 5]], grads)
    for old, new in zip(
        jax.tree.leaves((before, state_before)), jax.tree.leaves((after, state_after)), strict=True
    ):
        np.testing.assert_array_equal(old[1], new[1])
    assert (before["w"][0] != after["w"][0]).all()
    assert (before["w"][2] != after["w"][2]).all()


def test_an_expert_that_has_never_had_rows_stays_as_it_was():
    after, state = stepped([[5, 0, 5], [1, 0, 2]], jnp.ones((3, 4)))
    np.testing.assert_array_equal(after["w"][1], jnp.arange(4.0) + 4.0)
    assert list(state[1].count) == [2, 0, 2]
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves((after, state)))


def test_each_expert_moves_as_under_an_adam_of_its_own():
    grads = jax.random.normal(jax.random.key(0), (3, 4)) * jnp.asarray([[1e-3], [1.0], [1e3]])
    found, _ = stepped([[1, 1, 1]] * 3, grads)
    adam = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1, eps=1e-5))
    for expert in range(3):
        params = jnp.arange(12.0).reshape(3, 4)[expert]
        state = adam.init(params)
        for _ in range(3):
            moves, state = adam.update(grads[expert], state)
            params = optax.apply_updates(params, moves)
        np.testing.assert_allclose(found["w"][expert], params, rtol=1e-5)


def test_coasting_is_stepping_without_gradients():
    """Experts of another past each, which then take 5, 0 and 3 of seven steps."""
    past = jax.random.normal(jax.random.key(0), (3, 4))
    params, state = stepped([[1, 1, 1], [1, 1, 0], [0, 1, 0]], past)
    going_on = [[1, 0, 0], [1, 0, 1], [0, 0, 0], [1, 0, 1], [1, 0, 0], [0, 0, 1], [1, 0, 0]]
    expected, after = params, state
    for rows in going_on:
        expected, after = optimizer.step(
            HYPER,
            params=expected,
            state=after,
            grads={"w": jnp.zeros((3, 4))},
            rows=jnp.asarray(rows),
        )
    found, moments = optimizer.decay_unused(
        params["w"],
        (state[1].mu["w"], state[1].nu["w"]),
        taken=state[1].count,
        steps=jnp.asarray([5, 0, 3]),
        most=len(going_on),
        lr=jnp.asarray(0.1),
    )
    np.testing.assert_allclose(found, expected["w"], rtol=1e-5)
    np.testing.assert_allclose(moments[0], after[1].mu["w"], rtol=1e-5)
    np.testing.assert_allclose(moments[1], after[1].nu["w"], rtol=1e-5)
    assert np.array_equal(found[1], params["w"][1])
    assert (np.abs(found - params["w"])[[0, 2]] > 1e-3).any(axis=1).all()
