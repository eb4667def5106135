"""Rows sorted by expert and cut into tiles of one expert each.

The cost is that of the rows, not of rows × experts. `apply` and `evaluate` loop over the tiles in
use, `evaluate` over two at a time.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from flowrl.networks.actor_critic import take_expert
from flowrl.networks.packed import Packed, forward

_LEAST, _MOST, _MULTIPLE = 8, 160, 8  # rows of a tile
_MOST_LEARNT = 600  # in learning, where a tile's gradient is added to that of all experts
_SHARES = (0.5, 0.875, 1.0)  # of a full tile: the sizes in which tiles are computed
_MOST_NUMBERED = 2**31 - 1


class Tiles(NamedTuple):
    """Rows sorted by expert and cut into tiles; tile i is `order[start[i] : stop[i]]`."""

    order: jax.Array  # int32[B + size], padded so that every slice of `size` is inside
    expert: jax.Array  # int32[most tiles + 1]
    start: jax.Array
    stop: jax.Array  # that of a tile not in use is its start; the last one is never in use
    count: jax.Array  # tiles in use


def tile_size(num_rows: int, num_experts: int, most: int = _MOST) -> int:
    """Rows per tile, about `most` at most.

    An expert's share of randomly routed rows is nearly always within two standard deviations of
    the mean, so a tile of that size holds it whole: half-empty second tiles are rare.
    """
    share = num_rows / num_experts
    likely = share + 2.0 * math.sqrt(share)
    size = likely / math.ceil(likely / most)
    return max(_LEAST, _MULTIPLE * math.ceil(size / _MULTIPLE))


def tiles_of(expert: jax.Array, *, num_experts: int, size: int) -> Tiles:
    """Sort rows by expert and cut them into tiles of one expert each, of `size` rows at most."""
    num_rows = expert.shape[0]
    counts = jnp.bincount(expert, length=num_experts)
    needed = (counts + size - 1) // size
    tile_stops, row_stops = jnp.cumsum(needed), jnp.cumsum(counts)
    number = jnp.arange(num_rows // size + num_experts + 1, dtype=jnp.int32)
    owner = jnp.searchsorted(tile_stops, number, side="right").clip(0, num_experts - 1)
    start = (row_stops - counts)[owner] + (number - (tile_stops - needed)[owner]) * size
    stop = jnp.where(number < tile_stops[-1], jnp.minimum(start + size, row_stops[owner]), start)
    order = jnp.pad(_sorted_rows(expert, num_experts=num_experts), (0, size))
    return Tiles(order, owner.astype(jnp.int32), start, stop, tile_stops[-1])


def _sorted_rows(expert: jax.Array, *, num_experts: int) -> jax.Array:
    """Rows int32 `[B]` in the order of their experts, and in their own order within an expert."""
    num_rows = expert.shape[0]
    if num_experts * num_rows > _MOST_NUMBERED:
        return jnp.argsort(expert).astype(jnp.int32)
    # One number for both: XLA:CPU sorts that in a third of the time of two.
    keys = expert * num_rows + jnp.arange(num_rows, dtype=jnp.int32)
    return jax.lax.sort(keys, is_stable=False) % num_rows


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
    tiles = tiles_of(expert, num_experts=num_experts, size=size)
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
    rows = jnp.arange(num_rows, dtype=jnp.int32)
    place = jnp.zeros_like(rows).at[tiles.order[:num_rows]].set(rows, unique_indices=True)
    return logits[place], value[place]


def evaluate(packed: Packed, rows: Any, index: jax.Array, *, row_loss, activation: str):
    """Mean loss of the rows `index`, mean figures, and the loss's gradient, two tiles at a time.

    Gradients are taken inside the loop and added up, since reverse-mode differentiation through
    a loop of unknown length is impossible. Losses and figures are those of all rows at once.
    """
    num_rows, num_experts = index.shape[0], packed.first.kernel.shape[0]
    size = tile_size(num_rows, num_experts, _MOST_LEARNT)
    tiles = tiles_of(rows.expert[index], num_experts=num_experts, size=size)
    tiles = _longest_first(tiles._replace(order=index[tiles.order]))
    length = tiles.stop - tiles.start
    place = jnp.cumsum(length) - length

    def tile_loss(one: Packed, chosen: Any, inside: jax.Array):
        answer = forward(one, chosen.obs, activation=activation)
        loss, _ = row_loss(*answer, chosen)
        return jnp.where(inside, loss, 0.0).sum() / num_rows, answer

    def of_tile(number: jax.Array, *, rows_in: jax.Array, computed: int) -> Any:
        row = jax.lax.dynamic_slice(tiles.order, (tiles.start[number],), (computed,))
        inside = jnp.arange(computed) < rows_in
        # Filled up with a row of its own: another expert's could overflow, and 0 × inf is NaN.
        chosen = jax.tree.map(lambda leaf: leaf[jnp.where(inside, row, row[0])], rows)
        one = take_expert(packed, tiles.expert[number])
        grads, answer = jax.grad(tile_loss, has_aux=True)(one, chosen, inside)
        return grads, jax.tree.map(lambda leaf: _padded(leaf, size), (row, *answer))

    def add_pair(number: jax.Array, total: Any) -> Any:
        pair = 2 * number, 2 * number + 1
        found = _of_pair(of_tile, pair, length=length, size=size)
        for tile, (grads, answer) in zip(pair, found, strict=True):
            total = _with_tile(total, grads, answer, expert=tiles.expert[tile], at=place[tile])
        return total

    blank = jax.tree.map(jnp.zeros_like, packed), _blank_answers(packed, num_rows + size)
    grads, answers = jax.lax.fori_loop(0, (tiles.count + 1) // 2, add_pair, blank)
    row, *answer = (leaf[:num_rows] for leaf in answers)
    each = row_loss(*answer, jax.tree.map(lambda leaf: leaf[row], rows))
    return *jax.tree.map(jnp.mean, each), grads


def _longest_first(tiles: Tiles) -> Tiles:
    """Tiles by their number of rows, so that neighbours fit the same size."""
    by_length = jnp.argsort(tiles.start - tiles.stop)
    parts = {name: getattr(tiles, name)[by_length] for name in ("expert", "start", "stop")}
    return tiles._replace(**parts)


def _of_pair(of_tile: Any, pair: tuple[jax.Array, jax.Array], *, length: jax.Array, size: int):
    """What `of_tile` gives for two tiles, both computed in the least size that holds the first.

    XLA:CPU runs a tile's small products on one core; two tiles that do not depend on one another
    have one each. The last tile may have no partner: then it is taken twice, the second time
    without any row.
    """
    first, second = pair
    partner = jnp.where(length[second] > 0, second, first)
    sizes = sorted({max(1, int(share * size) // _MULTIPLE) * _MULTIPLE for share in _SHARES})

    def both(computed: int) -> Any:
        return (
            of_tile(first, rows_in=length[first], computed=computed),
            of_tile(partner, rows_in=length[second], computed=computed),
        )

    kind = jnp.searchsorted(jnp.asarray(sizes), length[first])
    return jax.lax.switch(kind, [partial(both, computed) for computed in sizes])


def _with_tile(total: Any, grads: Packed, answer: Any, *, expert: jax.Array, at: jax.Array) -> Any:
    """All experts' gradients and all rows' answers with those of one tile."""
    added = jax.tree.map(lambda whole, part: whole.at[expert].add(part), total[0], grads)

    # What is beyond the tile's rows is overwritten by the next tile.
    def put(whole: jax.Array, part: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(whole, part, at, axis=0)

    return added, jax.tree.map(put, total[1], answer)


def _blank_answers(packed: Packed, num_rows: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Row numbers, logits and values to be filled in."""
    num_actions = packed.actor[-1].bias.shape[-1]
    return jnp.zeros(num_rows, jnp.int32), jnp.zeros((num_rows, num_actions)), jnp.zeros(num_rows)


def _padded(leaf: jax.Array, size: int) -> jax.Array:
    return jnp.pad(leaf, ((0, size - leaf.shape[0]), *[(0, 0)] * (leaf.ndim - 1)))
