from __future__ import annotations

from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flowrl.networks import dispatch
from flowrl.networks.grouped import Packed, in_precision, pack, tile_size, tiles_of, unpack
from flowrl.networks.moe import ActorCritic, take_expert
from tests.networks.making import init_experts

METHODS = ["tiles", "dense"]
# Compiled once per form for all tests: most of them ask for the same shapes.
applied = jax.jit(dispatch.apply, static_argnames=("activation", "method"))
evaluated = jax.jit(dispatch.evaluate_rows, static_argnames=("row_loss", "activation", "method"))


class Rows(NamedTuple):
    obs: np.ndarray
    expert: np.ndarray
    target: np.ndarray


def row_loss(logits, value, rows):
    chosen = jax.nn.log_softmax(logits)[jnp.arange(len(value)), 1]
    error = (value - rows.target) ** 2
    return error - chosen, {"error": error}


@cache
def stacked_of(num_experts: int):
    sizes = {"observation_size": 30, "num_experts": num_experts}
    return init_experts(ActorCritic(4, 8), jax.random.key(1), **sizes)


def packed_of(num_experts: int) -> Packed:
    return pack(stacked_of(num_experts))


@partial(jax.jit, static_argnames="activation")
def oracle(stacked, obs, expert, activation="tanh"):
    """Every row by the flax module of its own expert: all experts evaluate all rows."""
    network = ActorCritic(4, 8, activation)
    logits, value = jax.vmap(lambda one: network.apply({"params": one}, obs))(stacked)
    rows = jnp.arange(len(obs))
    return logits[expert, rows], value[expert, rows]


@jax.jit
def oracle_gradient(stacked, rows):
    """The oracle's mean loss, mean figures and gradient, in packed form."""

    def mean_loss(stacked):
        return jax.tree.map(jnp.mean, row_loss(*oracle(stacked, rows.obs, rows.expert), rows))

    (loss, figures), grads = jax.value_and_grad(mean_loss, has_aux=True)(stacked)
    return loss, figures, pack(grads)


def sample(num_rows: int, experts, seed: int = 0) -> Rows:
    rng = np.random.default_rng(seed)
    return Rows(
        obs=rng.standard_normal((num_rows, 30), np.float32),
        expert=rng.choice(np.asarray(experts, np.int32), num_rows),
        target=rng.standard_normal(num_rows, np.float32),
    )


def evaluate(packed, rows, index, method):
    return evaluated(packed, rows, index, row_loss=row_loss, activation="tanh", method=method)


def assert_same(found, wanted):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=1e-6)


CASES = pytest.mark.parametrize(
    ("num_experts", "num_rows", "acting"),
    [
        (3, 500, [0, 1, 2]),
        (5, 200, [1, 4]),
        (4, 7, [0, 3]),
        (12, 130, [10, 1, 11]),
        (2, 1400, [1]),
        (3, 500, [0, 0, 0, 0, 0, 0, 0, 2]),
        (2, 1400, [0, 1]),
    ],
    ids=["all", "some absent", "fewer than a tile", "twelve", "only the last", "skewed", "split"],
)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("activation", ["tanh", "relu", "gelu"])
@pytest.mark.parametrize("acting", [[1, 4, 2], [3]], ids=["several", "one of five"])
def test_every_row_is_evaluated_by_its_own_expert(acting, activation, method):
    rows = sample(200, acting)
    expected = oracle(stacked_of(5), rows.obs, rows.expert, activation=activation)
    found = applied(packed_of(5), rows.obs, rows.expert, activation=activation, method=method)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-5, atol=1e-6)


def test_the_oracle_evaluates_a_row_as_its_expert_alone_does():
    rows = sample(40, range(12))
    logits, value = oracle(stacked_of(12), rows.obs, rows.expert)
    for row in range(0, 40, 5):
        alone = {"params": take_expert(stacked_of(12), int(rows.expert[row]))}
        one = ActorCritic(4, 8).apply(alone, rows.obs[row : row + 1])
        np.testing.assert_allclose(logits[row], one[0][0], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(value[row], one[1][0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", METHODS)
@CASES
def test_loss_and_gradients_equal_the_oracle_s(num_experts, num_rows, acting, method):
    rows = sample(num_rows * 2, acting)
    index = np.random.default_rng(5).permutation(num_rows * 2)[:num_rows].astype(np.int32)
    chosen = Rows(*(leaf[index] for leaf in rows))
    found = evaluate(packed_of(num_experts), rows, index, method)
    assert_same(found[:3], oracle_gradient(stacked_of(num_experts), chosen))
    assert int(found.rows.sum()) == num_rows


@pytest.mark.parametrize("method", METHODS)
def test_an_expert_without_rows_gets_no_gradient(method):
    rows = sample(400, [0, 3])
    found = evaluate(packed_of(5), rows, np.arange(200, dtype=np.int32), method)
    for leaf in jax.tree.leaves(found.grads):
        assert (np.asarray(leaf)[[1, 2, 4]] == 0).all()
    assert np.asarray(found.rows)[[1, 2, 4]].tolist() == [0, 0, 0]


def test_a_row_that_overflows_for_a_neighbour_s_expert_does_no_harm():
    def explode_for_others(logits, value, rows):
        return jnp.exp(1e3 * jnp.abs(value - rows.target)), {}

    packed = packed_of(3)
    rows = sample(40, [0, 1, 2])
    _, value = applied(packed, rows.obs, rows.expert, activation="tanh")
    found = evaluated(
        packed,
        rows._replace(target=np.asarray(value)),
        np.arange(40, dtype=np.int32),
        row_loss=explode_for_others,
        activation="tanh",
        method="tiles",
    )
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))


@pytest.mark.parametrize("method", ["plain", *METHODS])
def test_one_expert_needs_no_dispatch(method):
    rows = sample(50, [0])
    found = applied(packed_of(1), rows.obs, rows.expert, activation="tanh", method=method)
    expected = oracle(stacked_of(1), rows.obs, rows.expert)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-5, atol=1e-6)


def test_packing_and_unpacking_are_inverse_bit_for_bit():
    stacked = stacked_of(3)
    back = unpack(pack(stacked))
    assert jax.tree.structure(back) == jax.tree.structure(stacked)
    pairs = zip(jax.tree.leaves(back), jax.tree.leaves(stacked), strict=True)
    assert all(np.array_equal(one, other) for one, other in pairs)


def test_any_routing_gives_the_oracle_s_gradients():
    num_experts, num_rows, rng = 5, 200, np.random.default_rng(0)
    index = np.arange(num_rows, dtype=np.int32)
    for seed in range(20):
        share = rng.dirichlet(np.full(num_experts, 0.3))
        expert = rng.choice(num_experts, num_rows, p=share).astype(np.int32)
        rows = sample(num_rows, range(num_experts), seed)._replace(expert=expert)
        found = evaluate(packed_of(num_experts), rows, index, "tiles")
        assert_same(found[:3], oracle_gradient(stacked_of(num_experts), rows))


@pytest.mark.parametrize("seed", range(5))
def test_tiles_cover_every_row_once_and_never_mix_experts(seed):
    expert = sample(300, range(7), seed).expert
    size = tile_size(300, 7)
    sort = jax.jit(tiles_of, static_argnames=("num_experts", "size"))
    tiles = jax.device_get(sort(expert, num_experts=7, size=size))
    seen: list[int] = []
    for number in range(int(tiles.count)):
        rows = tiles.order[int(tiles.start[number]) : int(tiles.stop[number])]
        assert 0 < len(rows) <= size
        assert set(expert[rows].tolist()) == {int(tiles.expert[number])}
        seen.extend(rows.tolist())
    assert sorted(seen) == list(range(300))


def test_rows_of_one_expert_keep_their_order():
    expert = sample(300, range(7)).expert
    tiles = jax.jit(lambda expert: tiles_of(expert, num_experts=7, size=48))(expert)
    order = np.asarray(tiles.order)[:300]
    np.testing.assert_array_equal(order, np.argsort(expert, kind="stable"))


def test_the_last_tile_is_not_in_use_however_ragged_the_others_are():
    expert = np.repeat(np.arange(4, dtype=np.int32), 17)  # a full tile and one of one row each
    tiles = jax.device_get(jax.jit(partial(tiles_of, num_experts=4, size=16))(expert))
    assert int(tiles.count) == 8 == len(tiles.start) - 1
    assert int(tiles.stop[-1]) == int(tiles.start[-1])


def test_tiles_with_and_without_a_partner_count_once():
    for rows_each in (
        [80, 0, 0, 0],
        [0, 32, 48, 0],
        [8, 40, 0, 32],
        [20, 20, 20, 20],
        [1, 1, 77, 1],
    ):
        expert = np.repeat(np.arange(4, dtype=np.int32), rows_each)
        rows = sample(80, range(4))._replace(expert=expert)
        index = np.arange(80, dtype=np.int32)
        found = evaluate(packed_of(4), rows, index, "tiles")
        assert_same(found[:3], oracle_gradient(stacked_of(4), rows))


@pytest.mark.parametrize("method", METHODS)
def test_half_precision_computes_nearly_the_same_and_adds_up_logits_in_f32(method):
    packed, obs = packed_of(3), jax.random.normal(jax.random.key(2), (24, 30))
    expert = jnp.arange(24, dtype=jnp.int32) % 3
    expected = applied(packed, obs, expert, activation="tanh", method=method)
    half = in_precision(packed, "bf16")
    found = applied(half, obs, expert, activation="tanh", method=method)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == jnp.float32
        assert (one != other).any()
        np.testing.assert_allclose(one, other, atol=0.05)
