from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flowrl.models import dispatch
from flowrl.models.actor_critic import ActorCriticMoE, take_expert
from flowrl.models.tiles import tile_size, tiles_of

METHODS = ["tiles", "batched", "dense"]


class Rows(NamedTuple):
    obs: jax.Array
    expert: jax.Array
    target: jax.Array


def row_loss(logits, value, rows):
    chosen = jax.nn.log_softmax(logits)[jnp.arange(len(value)), 1]
    error = (value - rows.target) ** 2
    return error - chosen, {"error": error}


def body(num_experts: int, activation: str = "tanh") -> ActorCriticMoE:
    return ActorCriticMoE(
        num_experts=num_experts,
        observation_size=30,
        num_actions=4,
        layer_size=8,
        activation=activation,
    )


def sample(num_rows: int, experts, seed: int = 0) -> Rows:
    keys = jax.random.split(jax.random.key(seed), 3)
    return Rows(
        obs=jax.random.normal(keys[0], (num_rows, 30)),
        expert=jax.random.choice(keys[1], jnp.asarray(experts), (num_rows,)).astype(jnp.int32),
        target=jax.random.normal(keys[2], (num_rows,)),
    )


CASES = pytest.mark.parametrize(
    ("num_experts", "num_rows", "acting"),
    [
        (3, 64, [0, 1, 2]),
        (5, 200, [1, 4]),
        (4, 7, [0, 3]),
        (12, 130, [10, 1, 11]),
        (2, 512, [1]),
        (3, 500, [0, 0, 0, 0, 0, 0, 0, 2]),
        (2, 1400, [0, 1]),
    ],
    ids=["all", "some absent", "fewer than a tile", "twelve", "only the last", "skewed", "split"],
)


@pytest.mark.parametrize("method", ["tiles", "batched"])
@pytest.mark.parametrize("activation", ["tanh", "relu", "gelu"])
@pytest.mark.parametrize("acting", [[1, 4, 2], [3]], ids=["several", "one of five"])
def test_rows_are_answered_as_when_every_expert_is_evaluated(acting, activation, method):
    num_experts, num_rows = 5, 200
    packed = dispatch.pack(body(num_experts).init(jax.random.key(1)))
    rows = sample(num_rows, acting)
    wanted, found = (
        dispatch.apply_packed(packed, rows.obs, rows.expert, activation=activation, method=method)
        for method in ("dense", method)
    )
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found[1], wanted[1], rtol=1e-5, atol=1e-6)


def test_every_row_is_answered_by_its_own_expert():
    stacked = body(12).init(jax.random.key(0))
    rows = sample(40, range(12))
    logits, value = dispatch.apply(stacked, rows.obs, rows.expert)
    packed = dispatch.pack(stacked)
    for row in range(0, 40, 5):
        alone = take_expert(packed, int(rows.expert[row]))
        one = dispatch.forward(alone, rows.obs[row : row + 1], activation="tanh")
        np.testing.assert_allclose(logits[row], one[0][0], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(value[row], one[1][0], rtol=1e-5, atol=1e-6)


@CASES
def test_loss_and_gradients_equal_the_oracle_s(num_experts, num_rows, acting):
    packed = dispatch.pack(body(num_experts).init(jax.random.key(1)))
    rows = sample(num_rows * 2, acting)
    index = jax.random.permutation(jax.random.key(5), num_rows * 2)[:num_rows]
    wanted, found = (
        jax.jit(
            lambda packed, method=method: dispatch.evaluate_rows(
                packed, rows, index, row_loss=row_loss, activation="tanh", method=method
            )
        )(packed)
        for method in ("dense", "tiles")
    )
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=1e-6)
    assert int(found.rows.sum()) == num_rows


@pytest.mark.parametrize("method", METHODS)
def test_an_expert_without_rows_gets_no_gradient(method):
    packed = dispatch.pack(body(4).init(jax.random.key(1)))
    rows = sample(100, [0, 3])
    found = dispatch.evaluate_rows(
        packed, rows, jnp.arange(100), row_loss=row_loss, activation="tanh", method=method
    )
    for leaf in jax.tree.leaves(found.grads):
        assert (np.asarray(leaf[1:3]) == 0).all()
    assert list(found.rows[1:3]) == [0, 0]


@pytest.mark.parametrize("method", ["tiles", "batched"])
def test_a_row_that_overflows_for_a_neighbour_s_expert_does_no_harm(method):
    def explode_for_others(logits, value, rows):
        return jnp.exp(1e3 * jnp.abs(value - rows.target)), {}

    packed = dispatch.pack(body(3).init(jax.random.key(1)))
    rows = sample(40, [0, 1, 2])
    _, value = dispatch.apply_packed(packed, rows.obs, rows.expert, activation="tanh")
    found = dispatch.evaluate_rows(
        packed,
        rows._replace(target=value),
        jnp.arange(40),
        row_loss=explode_for_others,
        activation="tanh",
        method=method,
    )
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(found))


def test_one_expert_needs_no_dispatch():
    packed = dispatch.pack(body(1).init(jax.random.key(1)))
    rows = sample(50, [0])
    plain, dense, tiles = (
        dispatch.apply_packed(packed, rows.obs, rows.expert, activation="tanh", method=method)
        for method in ("plain", "dense", "tiles")
    )
    np.testing.assert_allclose(plain[0], dense[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(plain[0], tiles[0], rtol=1e-5, atol=1e-6)


def test_packing_and_unpacking_are_inverse_bit_for_bit():
    stacked = body(3).init(jax.random.key(2))
    back = dispatch.unpack(dispatch.pack(stacked))
    assert jax.tree.structure(back) == jax.tree.structure(stacked)
    pairs = zip(jax.tree.leaves(back), jax.tree.leaves(stacked), strict=True)
    assert all((one == other).all() for one, other in pairs)


def test_any_routing_gives_the_oracle_s_gradients():
    num_experts, num_rows, rng = 6, 150, np.random.default_rng(0)
    packed = dispatch.pack(body(num_experts).init(jax.random.key(1)))
    ways = [
        jax.jit(
            partial(dispatch.evaluate_rows, row_loss=row_loss, activation="tanh", method=method)
        )
        for method in ("dense", "tiles", "batched")
    ]
    for seed in range(20):
        share = rng.dirichlet(np.full(num_experts, 0.3))
        expert = jnp.asarray(rng.choice(num_experts, num_rows, p=share), jnp.int32)
        rows = sample(num_rows, range(num_experts), seed)._replace(expert=expert)
        wanted, *others = (way(packed, rows, jnp.arange(num_rows)) for way in ways)
        for found in others:
            for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
                np.testing.assert_allclose(one, other, rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_tiles_cover_every_row_once_and_never_mix_experts(seed):
    expert = np.asarray(sample(300, range(7), seed).expert)
    size = tile_size(300, 7)
    tiles = jax.tree.map(np.asarray, tiles_of(jnp.asarray(expert), num_experts=7, size=size))
    seen: list[int] = []
    for number in range(int(tiles.count)):
        rows = tiles.order[int(tiles.start[number]) : int(tiles.stop[number])]
        assert 0 < len(rows) <= size
        assert set(expert[rows].tolist()) == {int(tiles.expert[number])}
        seen.extend(rows.tolist())
    assert sorted(seen) == list(range(300))


@pytest.mark.parametrize("most_numbered", [2**31 - 1, 0], ids=["one number", "two"])
def test_rows_of_one_expert_keep_their_order(most_numbered, monkeypatch):
    monkeypatch.setattr("flowrl.models.tiles._MOST_NUMBERED", most_numbered)
    expert = sample(300, range(7)).expert
    order = tiles_of(expert, num_experts=7, size=48).order[:300]
    np.testing.assert_array_equal(order, np.argsort(np.asarray(expert), kind="stable"))


def test_the_last_tile_is_not_in_use_however_ragged_the_others_are():
    expert = jnp.repeat(jnp.arange(4), 17)  # a full tile and a tile of one row each
    tiles = tiles_of(expert, num_experts=4, size=16)
    assert int(tiles.count) == 8 == len(tiles.start) - 1
    assert int(tiles.stop[-1]) == int(tiles.start[-1])


def test_tiles_with_and_without_a_partner_count_once():
    packed = dispatch.pack(body(4).init(jax.random.key(1)))
    dense, tiles = (
        jax.jit(
            partial(dispatch.evaluate_rows, row_loss=row_loss, activation="tanh", method=method)
        )
        for method in ("dense", "tiles")
    )
    for rows_each in (
        [80, 0, 0, 0],
        [0, 32, 48, 0],
        [8, 40, 0, 32],
        [20, 20, 20, 20],
        [1, 1, 77, 1],
    ):
        expert = jnp.repeat(jnp.arange(4), jnp.asarray(rows_each))
        rows = sample(80, range(4))._replace(expert=expert)
        wanted, found = (way(packed, rows, jnp.arange(80)) for way in (dense, tiles))
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-4, atol=1e-6)
