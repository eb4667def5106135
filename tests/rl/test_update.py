from __future__ import annotations

import jax
import numpy as np

from flowrl.config import PPOConfig
from flowrl.rl import update

CONFIG = PPOConfig(num_envs=6, num_steps=10, update_epochs=3, num_minibatches=4)


def test_every_epoch_takes_each_row_once_and_in_an_order_of_its_own():
    minibatches = np.asarray(update._minibatches(CONFIG, jax.random.key(0)))
    assert minibatches.shape == (12, 15)
    epochs = minibatches.reshape(3, 60)
    assert (np.sort(epochs, axis=1) == np.arange(60)).all()
    assert len({tuple(epoch) for epoch in epochs}) == 3
