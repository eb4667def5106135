"""A digest of a world within a compiled program; alone, because recording and replay share it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

_ODD = 2654435761  # Knuth's multiplier: 2**32 divided by the golden ratio


def world_digest(world: Any, task: jax.Array) -> jax.Array:
    """uint32[]: a sum over all bits of a world and the plan's step.

    Each number counts with an odd factor of its own, so one that changes changes the digest.
    """
    total = task.astype(jnp.uint32)
    for leaf in jax.tree.leaves(world):
        numbers = _bits(leaf).reshape(-1)
        factors = 2 * jnp.arange(numbers.size, dtype=jnp.uint32) + 1
        total = total * jnp.uint32(_ODD) + (numbers * factors * jnp.uint32(_ODD)).sum()
    return total


def _bits(leaf: jax.Array) -> jax.Array:
    """The numbers of an array, or of random keys, as uint32; small types are widened."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(leaf)
    if leaf.dtype == bool:
        return leaf.astype(jnp.uint32)
    words = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}.get(leaf.dtype.itemsize)
    if words is None:
        return jax.lax.bitcast_convert_type(leaf, jnp.uint32)
    return jax.lax.bitcast_convert_type(leaf, words).astype(jnp.uint32)
