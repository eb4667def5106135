"""jax's random numbers for a few at a time, bit for bit, without its loops.

On CPUs jax computes the cipher behind its keys in a small loop, which is soon compiled and takes
long to start. A step of Craftax splits its key and draws single numbers some eighty times, and
spends more time on starting these loops than on the game. Here the cipher is written out.

Only what Craftax's step asks for is done so; anything else is jax's own.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

FEW = 8  # numbers at once; for more the loop does not matter
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


def known(key: jax.Array) -> bool:
    """Whether the key is of the kind whose splits and draws are written out here."""
    typed = jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key) and key.ndim == 0
    partitionable = jax.config.values["jax_threefry_partitionable"]
    return typed and partitionable and str(jax.random.key_impl(key)) == "threefry2x32"


def split(key: jax.Array, num: int = 2) -> jax.Array:
    """`jax.random.split` into a few keys."""
    if not known(key) or num > FEW:
        return jax.random.split(key, num)
    halves = jnp.stack(_threefry(jax.random.key_data(key), num), axis=-1)
    return jax.random.wrap_key_data(halves, impl=jax.random.key_impl(key))


def uniform(key: jax.Array, shape: tuple[int, ...] = (), **limits: Any) -> jax.Array:
    """`jax.random.uniform` of a few float32 numbers between 0 and 1."""
    if not known(key) or np.prod(shape) > FEW or limits:
        return jax.random.uniform(key, shape, **limits)
    ones = jnp.uint32(0x3F800000)  # the bits of 1.0; the drawn ones become its fraction
    return jax.lax.bitcast_convert_type((bits(key, shape) >> 9) | ones, jnp.float32) - 1


def randint(
    key: jax.Array, shape: tuple[int, ...], minval: Any, maxval: Any, **kind: Any
) -> jax.Array:
    """`jax.random.randint` of a few int32 numbers, the limits being known."""
    plain = isinstance(minval, int) and isinstance(maxval, int) and not kind
    if not known(key) or np.prod(shape) > FEW or not plain or minval >= maxval:
        return jax.random.randint(key, shape, minval, maxval, **kind)
    high, low = (bits(half, shape) for half in split(key))
    span = np.uint32(maxval - minval)
    with np.errstate(over="ignore"):
        factor = np.uint32(2**16) % span
        factor = (factor * factor) % span
    return jnp.int32(minval) + (((high % span) * factor + low % span) % span).astype(jnp.int32)


def choice(
    key: jax.Array, a: Any, *, shape: tuple[int, ...] = (), replace: bool = True, p: Any = None
) -> jax.Array:
    """`jax.random.choice` of one of a few things."""
    if not known(key) or shape or not replace or len(a) > FEW:
        return jax.random.choice(key, a, shape=shape, replace=replace, p=p)
    if p is None:
        return jnp.asarray(a)[randint(key, (), 0, len(a))]
    up_to = jnp.cumsum(p)
    drawn = up_to[-1] * (1 - uniform(key))
    return jnp.asarray(a)[(up_to < drawn).sum()]


def bits(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """`jax.random.bits` of a few numbers."""
    count = int(np.prod(shape))
    high, low = _threefry(jax.random.key_data(key), count)
    return (high ^ low).reshape(shape)


@partial(jax.jit, static_argnums=1)
def _threefry(words: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The block cipher Threefry-2x32 in 20 rounds, of the numbers below `count`.

    Jitted, so that it is traced once and not for every draw.
    """
    first, second = words
    counts = np.arange(count, dtype=np.uint32)
    keys = (first, second, first ^ second ^ jnp.uint32(_PARITY))
    x0 = jnp.broadcast_to(keys[0], counts.shape)
    x1 = keys[1] + counts
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = x0 ^ ((x1 << rotation) | (x1 >> (32 - rotation)))
        x0 = x0 + keys[(group + 1) % 3]
        x1 = x1 + keys[(group + 2) % 3] + np.uint32(group + 1)
    return x0, x1
