from __future__ import annotations

import jax
import numpy as np
import pytest

from flowrl.experts import checkpoint
from flowrl.networks.moe import ActorCritic, init_expert, stack_experts, take_expert
from flowrl.runs import expert_shapes
from tests.networks.making import words_of

NETWORK = ActorCritic(5, 16)


def fresh(seed: int, observation_size: int = 40):
    return init_expert(NETWORK, words_of(jax.random.key(seed)), observation_size=observation_size)


def test_an_expert_has_the_shapes_that_are_known_without_jax():
    assert checkpoint.shapes_of(fresh(0)) == expert_shapes(40, 5, 16)


def test_actor_and_critic_have_three_hidden_layers_and_an_output_each():
    shapes = expert_shapes(1345, 17, 64)
    assert shapes["actor/dense_3/kernel"] == (64, 17)
    assert shapes["critic/dense_3/kernel"] == (64, 1)
    assert len(shapes) == 16


@pytest.mark.parametrize(
    ("path", "gain"),
    [("actor/dense_0", 2**0.5), ("critic/dense_2", 2**0.5), ("actor/dense_3", 0.01)],
)
def test_weights_are_orthogonal_with_their_gain(path, gain):
    net, layer = path.split("/")
    kernel = fresh(1)[net][layer]["kernel"]
    assert np.allclose(kernel.T @ kernel, gain**2 * np.eye(kernel.shape[1]), atol=1e-5)


def test_a_wide_layer_has_orthonormal_rows():
    kernel = fresh(1, observation_size=4)["actor"]["dense_0"]["kernel"]
    assert np.allclose(kernel @ kernel.T, 2 * np.eye(4), atol=1e-5)


def test_the_same_key_gives_the_same_expert_and_another_key_another():
    one, same, other = map(fresh, (3, 3, 4))
    kernels = [expert["actor"]["dense_0"]["kernel"] for expert in (one, same, other)]
    assert (kernels[0] == kernels[1]).all()
    assert not np.allclose(kernels[0], kernels[2])


def test_flax_s_own_initializers_have_the_same_shapes_and_gains():
    own = NETWORK.init(jax.random.key(0), np.zeros((1, 40), np.float32))["params"]
    assert checkpoint.shapes_of(own) == expert_shapes(40, 5, 16)
    for one, other in zip(jax.tree.leaves(own), jax.tree.leaves(fresh(0)), strict=True):
        np.testing.assert_allclose(np.linalg.norm(one), np.linalg.norm(other), rtol=1e-4)


def test_stacking_and_taking_are_inverse_bit_for_bit():
    experts = [fresh(seed) for seed in range(12)]
    stacked = stack_experts(experts)
    for local, expert in enumerate(experts):
        pairs = zip(
            jax.tree.leaves(take_expert(stacked, local)), jax.tree.leaves(expert), strict=True
        )
        assert all((np.asarray(found) == leaf).all() for found, leaf in pairs)
