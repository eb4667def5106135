"""Fresh experts for tests and benchmarks."""

from __future__ import annotations

import jax
import numpy as np

from flowrl.networks.moe import ActorCritic, Params, init_expert, stack_experts


def words_of(key: jax.Array) -> np.ndarray:
    """The words of a random key, uint32 `[2]`."""
    return np.asarray(jax.random.key_data(key))


def init_experts(
    network: ActorCritic, key: jax.Array, *, observation_size: int, num_experts: int
) -> Params:
    """Fresh parameters of E experts, each from its own key; leaves `[E, …]`."""
    keys = map(words_of, jax.random.split(key, num_experts))
    return stack_experts([init_expert(network, k, observation_size=observation_size) for k in keys])
