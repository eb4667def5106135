"""Rows sorted by expert and cut into tiles of one expert each.

The cost is that of the rows, not of rows × experts. `apply` and `evaluate` loop over the tiles in
use, which suits a CPU. `apply_batched` evaluates all tiles at once, each with its own copy of its
expert's weights; it is meant for devices on which a loop is bound by the launching of its steps.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from flowrl.models.actor_critic import take_expert
from flowrl.models.packed import Packed, forward

_LEAST, _MOST, _MULTIPLE = 16, 160, 8  # rows of a tile
_SHARES = (0.25, 0.5, 0.75, 0.875)  # of a tile, in which a ragged one is computed


class Tiles(NamedTuple):
    """Rows sorted by expert and cut into tiles; tile i is `order[start[i] : stop[i]]`."""

    order: jax.Array  # int32[B + size], padded so that every slice of `size` is inside
    expert: jax.Array  # int32[most tiles]
    start: jax.Array
    stop: jax.Array
    count: jax.Array  # tiles in use


def tile_size(num_rows: int, num_experts: int) -> int:
    """Rows per tile.

    An expert's share of randomly routed rows is nearly always within two standard deviations of
    the mean, so a tile of that size holds it whole: half-empty second tiles are rare.
    """
    share = num_rows / num_experts
    likely = share + 2.0 * math.sqrt(share)
    size = likely / math.ceil(likely / _MOST)
    return max(_LEAST, _MULTIPLE * math.ceil(size / _MULTIPLE))


def _sizes(size: int) -> tuple[int, ...]:
    """Sizes in which tiles are computed: the last one of an expert is seldom full."""
    parts = {max(1, int(share * size) // _MULTIPLE) * _MULTIPLE for share in _SHARES}
    return (*sorted(parts - {size}), size)


def tiles_of(expert: jax.Array, *, num_experts: int) -> Tiles:
    """Sort rows by expert and cut them into tiles of one expert each."""
    num_rows = expert.shape[0]
    size = tile_size(num_rows, num_experts)
    counts = jnp.bincount(expert, length=num_experts)
    needed = (counts + size - 1) // size
    tile_stops, row_stops = jnp.cumsum(needed), jnp.cumsum(counts)
    number = jnp.arange(num_rows // size + num_experts, dtype=jnp.int32)
    owner = jnp.searchsorted(tile_stops, number, side="right").clip(0, num_experts - 1)
    start = (row_stops - counts)[owner] + (number - (tile_stops - needed)[owner]) * size
    stop = jnp.minimum(start + size, row_stops[owner])
    order = jnp.pad(jnp.argsort(expert).astype(jnp.int32), (0, size))
    return Tiles(order, owner.astype(jnp.int32), start, stop, tile_stops[-1])


def apply(packed: Packed, obs: jax.Array, expert: jax.Array, *, activation: str):
    """Logits `[B, actions]` and values `[B]`, tile by tile.

    When one expert acts in all rows, as in the first steps of a plan, it is evaluated once.
    """

    def alone() -> tuple[jax.Array, jax.Array]:
        return forward(take_expert(packed, expert[0]), obs, activation=activation)

    def several() -> tuple[jax.Array, jax.Array]:
        return _apply_each(packed, obs, expert, activation=activation)

    return jax.lax.cond((expert == expert[0]).all(), alone, several)


def _apply_each(packed: Packed, obs: jax.Array, expert: jax.Array, *, activation: str):
    num_rows, num_experts = obs.shape[0], packed.first.kernel.shape[0]
    size = tile_size(num_rows, num_experts)
    tiles = tiles_of(expert, num_experts=num_experts)
    num_actions = packed.actor[-1].bias.shape[-1]

    def write_tile(number: jax.Array, out: tuple[jax.Array, jax.Array]):
        start = tiles.start[number]
        row = jax.lax.dynamic_slice(tiles.order, (start,), (size,))
        one = take_expert(packed, tiles.expert[number])
        logits, value = forward(one, obs[row], activation=activation)
        # Rows beyond the tile's end are the next tile's, which overwrites them.
        return (
            jax.lax.dynamic_update_slice(out[0], logits, (start, 0)),
            jax.lax.dynamic_update_slice(out[1], value, (start,)),
        )

    blank = jnp.zeros((num_rows + size, num_actions)), jnp.zeros(num_rows + size)
    logits, value = jax.lax.fori_loop(0, tiles.count, write_tile, blank)
    place = jnp.argsort(tiles.order[:num_rows])
    return logits[place], value[place]


def apply_batched(packed: Packed, obs: jax.Array, expert: jax.Array, *, activation: str):
    """As `apply`, all tiles at once; can be differentiated."""
    num_rows, num_experts = obs.shape[0], packed.first.kernel.shape[0]
    size = tile_size(num_rows, num_experts)
    tiles = tiles_of(expert, num_experts=num_experts)
    used = jnp.arange(tiles.start.shape[0]) < tiles.count
    start = jnp.where(used, tiles.start, 0)
    place = start[:, None] + jnp.arange(size)
    inside = used[:, None] & (place < tiles.stop[:, None])
    # Filled up with rows of its own: what another expert's row gives may overflow.
    row = tiles.order[jnp.where(inside, place, start[:, None])]
    owner = jnp.where(used, tiles.expert, expert[tiles.order[0]])
    logits, value = jax.vmap(lambda one, seen: forward(one, seen, activation=activation))(
        take_expert(packed, owner), obs[row]
    )
    slots = jnp.arange(row.size, dtype=jnp.int32)
    slot = jnp.zeros(num_rows, jnp.int32)
    slot = slot.at[jnp.where(inside, row, num_rows).ravel()].set(slots, mode="drop")
    return logits.reshape(row.size, -1)[slot], value.reshape(row.size)[slot]


def evaluate(packed: Packed, rows: Any, index: jax.Array, *, row_loss, activation: str):
    """Mean loss of the rows `index`, mean figures, and the loss's gradient, tile by tile.

    Gradients are taken inside the loop and added up, since reverse-mode differentiation through
    a loop of unknown length is impossible. A tile that is not full is computed in the least of a
    few sizes that holds its rows.
    """
    num_rows, num_experts = index.shape[0], packed.first.kernel.shape[0]
    size = tile_size(num_rows, num_experts)
    tiles = tiles_of(rows.expert[index], num_experts=num_experts)

    def tile_loss(one: Packed, chosen: Any, inside: jax.Array):
        logits, value = forward(one, chosen.obs, activation=activation)
        each = row_loss(logits, value, chosen)
        return jax.tree.map(lambda x: jnp.where(inside, x, 0.0).sum() / num_rows, each)

    def of_tile(size: int, number: jax.Array, one: Packed) -> Any:
        start = tiles.start[number]
        place = start + jnp.arange(size)
        inside = place < tiles.stop[number]
        # Filled up with a row of its own: another expert's could overflow, and 0 × inf is NaN.
        row = index[tiles.order[jnp.where(inside, place, start)]]
        chosen = jax.tree.map(lambda leaf: leaf[row], rows)
        return jax.value_and_grad(tile_loss, has_aux=True)(one, chosen, inside)

    sizes = _sizes(size)
    kinds = [partial(of_tile, rows_of_kind) for rows_of_kind in sizes]

    def add_tile(number: jax.Array, total: Any) -> Any:
        owner = tiles.expert[number]
        kind = jnp.searchsorted(jnp.asarray(sizes), tiles.stop[number] - tiles.start[number])
        sums, grads = jax.lax.switch(kind, kinds, number, take_expert(packed, owner))
        added = jax.tree.map(lambda whole, part: whole.at[owner].add(part), total[1], grads)
        return jax.tree.map(jnp.add, total[0], sums), added

    first = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((size, *leaf.shape[1:]), leaf.dtype), rows
    )
    shape = jax.eval_shape(tile_loss, take_expert(packed, 0), first, jnp.ones(size, bool))
    blank = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shape)
    zeros = jax.tree.map(jnp.zeros_like, packed)
    (loss, figures), grads = jax.lax.fori_loop(0, tiles.count, add_tile, (blank, zeros))
    return loss, figures, grads
