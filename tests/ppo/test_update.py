from __future__ import annotations

import jax
import numpy as np
import pytest

from flowrl.config import PPOConfig
from flowrl.ppo import programs, update

CONFIG = PPOConfig(num_envs=6, num_steps=10, update_epochs=3, num_minibatches=4)


def test_every_epoch_takes_each_row_once_and_in_an_order_of_its_own():
    minibatches = np.asarray(update.draw_minibatches(CONFIG, [jax.random.key(0)]))
    assert minibatches.shape == (12, 15)
    epochs = minibatches.reshape(3, 60)
    assert (np.sort(epochs, axis=1) == np.arange(60)).all()
    assert len({tuple(epoch) for epoch in epochs}) == 3


@pytest.mark.parametrize("rows", [1, 24, 32])
def test_each_row_is_as_often_at_each_place_of_an_order(rows):
    """Of 31² degrees of freedom, chi-square is 961 ± 44."""
    orders = np.asarray(update.draw_orders(jax.random.key(3), 3200, rows))
    counts = np.stack([np.bincount(place, minlength=rows) for place in orders.T])
    expected = 3200 / rows
    assert ((counts - expected) ** 2 / expected).sum() == pytest.approx((rows - 1) ** 2, rel=0.15)


@pytest.mark.parametrize("shards", [1, 3])
def test_each_shard_of_environments_has_keys_of_its_own(shards):
    key = jax.random.key(5)
    pairs = programs._shard_keys(shards, key)
    keys = [key] if shards == 1 else list(jax.random.split(key, shards))
    wanted = [jax.random.key_data(jax.random.split(one)).tolist() for one in keys]
    assert [[jax.random.key_data(one).tolist() for one in pair] for pair in pairs] == wanted
