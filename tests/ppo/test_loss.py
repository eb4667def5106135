from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flowrl.config import PPOConfig
from flowrl.ppo.loss import Hyperparameters, Rows, ppo_loss

CONFIG = PPOConfig(clip_eps=0.2, ent_coef=0.0, vf_coef=0.0)


def one_row(*, old: float, new: float, advantage: float, config: PPOConfig = CONFIG):
    """The loss of one row whose action had probability `old` and now has `new`."""
    rows = Rows(
        obs=jnp.zeros((1, 1)),
        expert=jnp.zeros(1, jnp.int32),
        action=jnp.zeros(1, jnp.int32),
        log_prob=jnp.log(jnp.asarray([old])),
        advantage=jnp.asarray([advantage]),
        target=jnp.asarray([3.0]),
    )
    logits = jnp.log(jnp.asarray([[new, 1 - new]]))
    loss, figures = ppo_loss(
        logits, jnp.asarray([1.0]), rows, hyper=Hyperparameters.of(config, 0.0)
    )
    return float(loss[0]), {name: float(figure[0]) for name, figure in figures.items()}


@pytest.mark.parametrize(
    ("old", "new", "advantage", "loss"),
    [
        (0.5, 0.5, 2.0, -2.0),
        (0.5, 0.55, 2.0, -2.2),
        (0.5, 0.8, 2.0, -2.4),  # clipped: no further gain
        (0.5, 0.2, 2.0, -0.8),  # not clipped: the loss is real
        (0.5, 0.2, -2.0, 1.6),  # clipped
        (0.5, 0.8, -2.0, 3.2),
    ],
)
def test_the_surrogate_is_clipped_on_the_side_of_gain_only(old, new, advantage, loss):
    assert one_row(old=old, new=new, advantage=advantage)[0] == pytest.approx(loss, abs=1e-5)


def test_value_error_and_entropy_enter_with_their_weights():
    config = PPOConfig(vf_coef=0.25, ent_coef=0.1)
    loss, figures = one_row(old=0.5, new=0.5, advantage=0.0, config=config)
    assert figures["value_loss"] == pytest.approx(2.0)
    assert figures["entropy"] == pytest.approx(np.log(2), abs=1e-5)
    assert loss == pytest.approx(0.25 * 2.0 - 0.1 * np.log(2), abs=1e-5)


def test_a_clipped_row_has_no_policy_gradient():
    def loss(logit):
        rows = Rows(
            obs=jnp.zeros((1, 1)),
            expert=jnp.zeros(1, jnp.int32),
            action=jnp.zeros(1, jnp.int32),
            log_prob=jnp.log(jnp.asarray([0.5])),
            advantage=jnp.ones(1),
            target=jnp.ones(1),
        )
        return ppo_loss(
            jnp.asarray([[logit, 0.0]]), jnp.ones(1), rows, hyper=Hyperparameters.of(CONFIG, 0.0)
        )[0][0]

    assert jax.grad(loss)(2.0) == 0.0
    assert jax.grad(loss)(0.0) < 0.0
