"""Experts that see a grid of cells: one convolution below actor and critic."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flowrl.experts import checkpoint
from flowrl.games.base import Game
from flowrl.networks import dispatch
from flowrl.networks.grouped import pack, unpack
from flowrl.networks.moe import ActorCritic, init_expert, stack_experts
from flowrl.ppo.programs import seed_words
from flowrl.runs import expert_shapes

SIZE, ACTIONS, WIDTH = (5, 7, 3), 4, 8  # more columns than rows: neither is taken for the other


class Rows(NamedTuple):
    obs: jax.Array
    expert: jax.Array
    target: jax.Array


def experts_of(number: int):
    network = ActorCritic(ACTIONS, WIDTH)
    return [init_expert(network, seed_words(n), observation_size=SIZE) for n in range(number)]


def rows_of(number: int, experts: int) -> Rows:
    rng = np.random.default_rng(0)
    obs = rng.standard_normal((number, *SIZE), np.float32)
    expert = rng.integers(0, experts, number, np.int32)
    return jax.tree.map(jnp.asarray, Rows(obs, expert, rng.standard_normal(number, np.float32)))


def row_loss(logits, value, rows):
    error = (value - rows.target) ** 2
    return error - jax.nn.log_softmax(logits)[jnp.arange(len(value)), 1], {"error": error}


def oracle(stacked, rows):
    network = ActorCritic(ACTIONS, WIDTH)
    logits, value = jax.vmap(lambda one: network.apply({"params": one}, rows.obs))(stacked)
    number = jnp.arange(len(rows.obs))
    return logits[rows.expert, number], value[rows.expert, number]


def mean_loss(stacked, rows):
    return row_loss(*oracle(stacked, rows), rows)[0].mean()


def test_an_expert_of_a_grid_has_the_shapes_that_are_known_without_jax():
    shapes = expert_shapes(SIZE, ACTIONS, WIDTH)
    assert checkpoint.shapes_of(experts_of(1)[0]) == shapes
    assert shapes["trunk/conv/kernel"] == (3, 3, 3, 16)
    assert shapes["critic/dense_0/kernel"] == (5 * 7 * 16, WIDTH)


def test_a_convolution_s_kernel_is_orthogonal_too():
    kernel = experts_of(1)[0]["trunk"]["conv"]["kernel"].reshape(-1, 16)
    np.testing.assert_allclose(kernel.T @ kernel, 2 * np.eye(16), atol=1e-5)


def test_packing_loses_nothing():
    stacked = stack_experts(experts_of(3))
    jax.tree.map(np.testing.assert_array_equal, unpack(pack(stacked)), stacked)


@pytest.mark.parametrize(("number", "method"), [(1, "plain"), (3, "tiles"), (3, "dense")])
def test_every_method_computes_what_the_flax_module_does(number, method):
    stacked, rows = stack_experts(experts_of(number)), rows_of(100, number)
    found = dispatch.apply(pack(stacked), rows.obs, rows.expert, activation="tanh", method=method)
    for one, other in zip(found, oracle(stacked, rows), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    result = dispatch.evaluate_rows(
        pack(stacked), rows, np.arange(100), row_loss=row_loss, activation="tanh", method=method
    )
    wanted = jax.grad(mean_loss)(stacked, rows)
    for one, other in zip(
        jax.tree.leaves(unpack(result.grads)), jax.tree.leaves(wanted), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=2e-3, atol=1e-5)


def test_an_expert_of_a_row_of_numbers_has_no_trunk():
    one = init_expert(ActorCritic(ACTIONS, WIDTH), seed_words(0), observation_size=6)
    packed = pack(stack_experts([one]))
    assert packed.trunk == ()
    assert set(unpack(packed)) == {"actor", "critic"}


FIELDS = {"name": "G", "num_actions": 3, "capacity": 1, "features": {}, "enums": {}}
FIELDS |= {"library_folder": Path(), "sources": (), "make": None}
MAP = {"observation_size": 49, "view": (3, 3, 5), "heading": 45, "num_actions": 5}


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"observation_size": (5, 7)}, r"observation_size is \(5, 7\), .*rows, columns and chann"),
        ({"observation_size": (None, 7, 3)}, "which never change"),
        ({"observation_size": 0}, "observation_size is 0, not a whole number from 1"),
        ({"observation_size": 4, "num_actions": 2.5}, "cut continuous actions into a few levels"),
        ({"observation_size": SIZE, "cells": (1, 1)}, "a grid has no view, heading or cells"),
        ({"observation_size": SIZE, "view": SIZE}, "a grid has no view, heading or cells"),
        ({"observation_size": 99, "moves": (0, 1, 2, 3)}, "moves need a view, and a heading"),
        ({**MAP, "moves": (0, 1, 2, 3), "heading": 44}, "heading that begins behind it"),
        ({**MAP, "moves": (0, 1, 2, 3), "view": (2, 3, 5)}, "moves need a map with a middle"),
        ({**MAP, "moves": 5}, "moves are 5, not four actions below 5"),
        ({**MAP, "moves": (True, 0, 2, 3)}, "not four actions below 5"),
        ({**MAP, "moves": (0, 1, 2)}, r"moves are \(0, 1, 2\), not four actions below 5"),
        ({**MAP, "moves": (0, 1, 2, 2)}, r"moves are \(0, 1, 2, 2\), not four actions"),
        ({**MAP, "moves": (1, 2, 3, 5)}, r"moves are \(1, 2, 3, 5\), not four actions"),
    ],
)
def test_an_observation_that_does_not_fit_is_told_in_a_line(fields, why):
    with pytest.raises(ValueError, match=why):
        Game(**{**FIELDS, **fields})


def test_a_grid_has_no_columns_beside_it():
    game = Game(**FIELDS, observation_size=SIZE)
    for sight, egocentric in itertools.product((True, False), repeat=2):
        assert game.observed(sight=sight, egocentric=egocentric) == SIZE
    assert game.is_grid
    assert not Game(**FIELDS, observation_size=9).is_grid
