"""Random numbers computed without loops are jax's own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flowrl.envs import quick_random

WAYS = jnp.array([[0, -1], [0, 1], [-1, 0], [1, 0]])
CALLS = {
    "split": lambda random, key: jax.random.key_data(random.split(key)),
    "split in three": lambda random, key: jax.random.key_data(random.split(key, 3)),
    "uniform": lambda random, key: random.uniform(key),
    "one uniform": lambda random, key: random.uniform(key, (1,)),
    "randint": lambda random, key: random.randint(key, (), 0, 4),
    "randint of an odd span": lambda random, key: random.randint(key, shape=(), minval=2, maxval=7),
    "choice": lambda random, key: random.choice(key, jnp.arange(8)),
    "choice of a row": lambda random, key: random.choice(key, WAYS),
    "choice with odds": lambda random, key: random.choice(
        key, jnp.arange(5), p=jnp.array([0.3, 0.3, 0.15, 0.125, 0.125])
    ),
    "choice with an impossible one": lambda random, key: random.choice(
        key, jnp.arange(2), p=jnp.array([0.0, 1.0])
    ),
    "too many": lambda random, key: random.uniform(key, (20,)),
    "in other limits": lambda random, key: random.uniform(key, minval=2.0, maxval=3.0),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_the_same_key_gives_the_same_numbers(call):
    keys = jax.random.split(jax.random.key(9), 2000)
    ours, jaxs = (
        jax.jit(jax.vmap(lambda key, random=random: call(random, key)))(keys)
        for random in (quick_random, jax.random)
    )
    assert ours.dtype == jaxs.dtype
    assert (np.asarray(ours) == np.asarray(jaxs)).all()


def test_keys_of_another_kind_are_left_to_jax():
    for key in (jax.random.key(3, impl="rbg"), jax.random.PRNGKey(3)):
        assert not quick_random.known(key)
        assert quick_random.uniform(key) == jax.random.uniform(key)
