from __future__ import annotations

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flowrl.config import PPOConfig
from flowrl.envs.base import StepOutput
from flowrl.networks import dispatch
from flowrl.networks.grouped import Packed, pack
from flowrl.networks.moe import ActorCritic
from flowrl.ppo import optimizer, sparse_inputs
from flowrl.ppo.loss import Hyperparameters
from flowrl.ppo.rollout import RolloutBatch, Timestep
from flowrl.ppo.sparse_inputs import (
    columns_in_use,
    first_kernels,
    learn_from_columns,
    select_kernel,
    select_obs,
    widths_for,
    with_first,
)
from flowrl.ppo.update import TrainState, draw_minibatches, learn
from tests.networks.making import init_experts

SIZE, STEPS, ENVS = 200, 6, 16
WIDTH = widths_for(SIZE)[-1]
CONFIG = PPOConfig(num_envs=ENVS, num_steps=STEPS, update_epochs=2, num_minibatches=2, layer_size=8)
HYPER = Hyperparameters.of(CONFIG, 1e-2)


def obs_of(used: int) -> jax.Array:
    """Observations that are zero but in `used` scattered columns, f32[STEPS * ENVS, SIZE]."""
    rng = np.random.default_rng(used)
    obs = np.zeros((STEPS * ENVS, SIZE), np.float32)
    obs[:, rng.permutation(SIZE)[:used]] = rng.standard_normal((STEPS * ENVS, used))
    return jnp.asarray(obs)


def acted_of(used: int, num_experts: int) -> RolloutBatch:
    rng = np.random.default_rng(used)
    size = (STEPS, ENVS)
    never = jnp.zeros(size, bool)
    numbers = rng.standard_normal((3, *size)).astype(np.float32)
    expert = jnp.asarray(rng.integers(0, num_experts, size), jnp.int32)
    output = StepOutput(
        reward=jnp.asarray(numbers[0]),
        done=never,
        boundary=never,
        truncated=never,
        task=expert,
        expert=expert,
        next_expert=expert,
        task_success=never[..., None],
        lied=never,
        explored=jnp.asarray(numbers[0] > 0),
        kept=jnp.zeros((*size, 0), bool),
        cause=jnp.zeros((*size, 0), bool),
        episode_length=jnp.zeros(size, jnp.int32),
        episode_return=jnp.zeros(size),
    )
    steps = Timestep(
        obs=obs_of(used).reshape(*size, SIZE),
        action=jnp.asarray(rng.integers(0, 5, size), jnp.int32),
        log_prob=jnp.asarray(numbers[1] - 2),
        value=jnp.asarray(numbers[2]),
        potential=jnp.zeros(size),
        output=output,
    )
    shuffle_key = jax.random.key_data(jax.random.key(used))[None]
    return RolloutBatch(steps, jnp.zeros(ENVS), shuffle_key)


def experts(num_experts: int) -> Packed:
    sizes = {"observation_size": SIZE, "num_experts": num_experts}
    return pack(init_experts(ActorCritic(5, 8), jax.random.key(1), **sizes))


@cache
def learning(few: bool, config: PPOConfig = CONFIG):
    """An update, compiled once for all tests that learn from few columns, or from all."""

    def update(state: TrainState, batch: RolloutBatch, hyper: Hyperparameters):
        minibatches = draw_minibatches(CONFIG, [jax.random.wrap_key_data(batch.shuffle_key[0])])
        common = {"minibatches": minibatches, "hyper": hyper}
        if few:
            return learn_from_columns(config, state, (batch,), **common)
        return learn(config, state, batch, **common)

    return jax.jit(update)


def learnt(num_experts: int, used: tuple[int, ...], *, few: bool):
    """Experts that have learnt from rollouts one after another, Adam's state, and the reports."""
    params, reports = experts(num_experts), []
    state = TrainState(params, optimizer.init(params))
    for count in used:
        state, stats = learning(few)(state, acted_of(count, num_experts), HYPER)
        reports.append(stats)
    return state, reports


@pytest.mark.parametrize(
    ("num_experts", "used"),
    [
        (1, (50, 20)),
        (3, (WIDTH, 30, 0)),
        (3, (WIDTH + 1, 40)),
        (3, (SIZE, 10)),
    ],
)
@pytest.mark.parametrize("large", [SIZE, SIZE + 1])
def test_learning_from_few_columns_is_learning_from_all(monkeypatch, num_experts, used, large):
    """Also where a column was in use before: its weights go on by their momentum."""
    monkeypatch.setattr(sparse_inputs, "_LARGE", large)
    found = learnt(num_experts, used, few=True)
    expected = learnt(num_experts, used, few=False)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("used", [0, 1, 50, WIDTH, SIZE])
def test_columns_in_use_come_first(used):
    obs = obs_of(used)
    found = columns_in_use([obs[:40], obs[40:]])
    assert found.used == used
    assert sorted(found.order.tolist()) == list(range(SIZE))
    assert not np.asarray(obs)[:, found.order[used:]].any()


def test_a_column_that_is_below_zero_or_nan_is_in_use():
    obs = np.zeros((2, SIZE), np.float32)
    obs[0, 7], obs[1, 9] = -1.0, np.nan
    assert columns_in_use([jnp.asarray(obs)]).order[:2].tolist() == [7, 9]


@pytest.mark.parametrize("most", [2**31 - 1, 0], ids=["by number", "by column"])
def test_columns_are_select_obs(monkeypatch, most):
    monkeypatch.setattr(sparse_inputs, "_MOST_NUMBERED", most)
    obs, chosen = obs_of(50), jnp.asarray([3, 199, 0], jnp.int32)
    assert np.array_equal(select_obs(obs, chosen), np.asarray(obs)[:, [3, 199, 0]])


def test_experts_of_few_columns_say_the_same():
    obs, expert = obs_of(50), jnp.zeros(STEPS * ENVS, jnp.int32)
    chosen = columns_in_use([obs]).order[:WIDTH]
    (kernel,) = first_kernels(experts(1))
    narrow = with_first(experts(1), [select_kernel(kernel, chosen)])
    few = dispatch.apply(narrow, select_obs(obs, chosen), expert, activation="tanh")
    whole = dispatch.apply(experts(1), obs, expert, activation="tanh")
    np.testing.assert_allclose(few[0], whole[0], atol=1e-6)
    np.testing.assert_allclose(few[1], whole[1], atol=1e-5)


def test_kernels_that_are_taken_apart_can_be_put_together():
    tree = {"params": experts(3), "count": jnp.arange(3)}
    found = columns_in_use([obs_of(50)])
    (kernel,) = first_kernels(tree)
    parts = [select_kernel(kernel, columns) for columns in (found.order[:64], found.order[64:])]
    whole = select_kernel(jnp.concatenate(parts, axis=1), found.position)
    again = with_first(with_first(tree, parts[:1]), [whole])
    for one, other in zip(jax.tree.leaves(again), jax.tree.leaves(tree), strict=True):
        assert np.array_equal(one, other)


def test_small_observations_are_learned_from_whole():
    assert widths_for(2) == (2,)
    assert widths_for(1345) == (960,)
    assert widths_for(8809) == (2688, 6208)


@pytest.mark.parametrize("field", Hyperparameters._fields)
def test_every_hyperparameter_is_data_that_moves_the_experts(field):
    """The same program learns otherwise from another number."""
    batch, params = acted_of(30, 3), experts(3)
    state = TrainState(params, optimizer.init(params))
    other = HYPER._replace(**{field: np.float32(0.1 * getattr(HYPER, field))})
    found, expected = (learning(True)(state, batch, hyper)[0].params for hyper in (other, HYPER))
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    assert any((one != other).any() for one, other in pairs)


def test_learning_in_half_precision_keeps_parameters_and_moments_in_f32():
    params, batch = experts(1), acted_of(50, 1)
    state = TrainState(params, optimizer.init(params))
    half = replace(CONFIG, precision="bf16")
    found, expected = (learning(False, config)(state, batch, HYPER)[0] for config in (half, CONFIG))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
    for one, other in zip(found.params.first, expected.params.first, strict=True):
        assert (one != other).any()
        np.testing.assert_allclose(one, other, atol=0.05)
