from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flowrl.config import PPOConfig
from flowrl.models import dispatch
from flowrl.models.actor_critic import ActorCriticMoE
from flowrl.rl.columns import broadened, columns_of, narrowed, width_for
from flowrl.rl.loss import Rows, ppo_loss
from flowrl.rl.update import _evaluating

SIZE, ROWS = 200, 96
CONFIG = PPOConfig(layer_size=8)


def rows_of(used: int, num_experts: int) -> Rows:
    """Rows whose observations are zero but in `used` scattered columns."""
    rng = np.random.default_rng(used)
    obs = np.zeros((ROWS, SIZE), np.float32)
    columns = rng.permutation(SIZE)[:used]
    obs[:, columns] = rng.standard_normal((ROWS, used))
    numbers = rng.standard_normal((3, ROWS)).astype(np.float32)
    return Rows(
        obs=jnp.asarray(obs),
        expert=jnp.asarray(rng.integers(0, num_experts, ROWS), jnp.int32),
        action=jnp.asarray(rng.integers(0, 5, ROWS), jnp.int32),
        log_prob=jnp.asarray(numbers[0] - 2),
        advantage=jnp.asarray(numbers[1]),
        target=jnp.asarray(numbers[2]),
    )


def packed_experts(num_experts: int) -> dispatch.Packed:
    body = ActorCriticMoE(
        num_experts=num_experts, observation_size=SIZE, num_actions=5, layer_size=8
    )
    return dispatch.pack(body.init(jax.random.key(1)))


def loss_of(logits, value, chosen):
    return ppo_loss(logits, value, chosen, config=CONFIG)


@pytest.mark.parametrize(
    ("num_experts", "used"), [(1, 0), (1, 50), (3, width_for(SIZE)), (1, width_for(SIZE) + 1)]
)
def test_few_columns_give_the_gradients_of_all(num_experts, used):
    rows, packed = rows_of(used, num_experts), packed_experts(num_experts)
    index = jnp.asarray(np.random.default_rng(0).permutation(ROWS)[:64], jnp.int32)
    expected = dispatch.evaluate_rows(
        packed, rows, index, row_loss=loss_of, activation=CONFIG.activation, method="dense"
    )
    evaluating = _evaluating(CONFIG, rows, [rows.obs[:40], rows.obs[40:]])
    found = jax.jit(lambda packed: evaluating(lambda evaluate, p: evaluate(p, index), packed))(
        packed
    )
    assert np.array_equal(found.rows, expected.rows)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("used", [0, 1, 50, width_for(SIZE)])
def test_all_columns_in_use_are_chosen_where_they_fit(used):
    rows = rows_of(used, 1)
    chosen, _, fit = columns_of([rows.obs])
    assert fit
    assert len(set(chosen.tolist())) == len(chosen) == width_for(SIZE)
    left = np.delete(np.asarray(rows.obs), np.asarray(chosen), axis=1)
    assert not left.any()


def test_one_column_more_does_not_fit():
    assert not columns_of([rows_of(width_for(SIZE) + 1, 1).obs]).fit


def test_narrowed_experts_say_the_same_of_the_chosen_columns():
    rows, packed = rows_of(50, 1), packed_experts(1)
    chosen = columns_of([rows.obs]).chosen
    few = dispatch.apply_packed(
        narrowed(packed, chosen), rows.obs[:, chosen], rows.expert, activation="tanh"
    )
    whole = dispatch.apply_packed(packed, rows.obs, rows.expert, activation="tanh")
    np.testing.assert_allclose(few[0], whole[0], atol=1e-6)
    np.testing.assert_allclose(few[1], whole[1], atol=1e-5)


def test_broadened_gradients_are_zero_in_the_other_columns():
    packed = packed_experts(3)
    chosen, place, _ = columns_of([rows_of(50, 1).obs])
    whole = broadened(narrowed(packed, chosen), place).first.kernel
    assert np.array_equal(whole[:, chosen], packed.first.kernel[:, chosen])
    assert not np.delete(np.asarray(whole), chosen, axis=1).any()


def test_small_observations_are_learned_from_whole():
    assert width_for(2) == 2
    assert width_for(1345) == 960
