"""Evaluation of many rows by many experts, at the cost of the rows and not of rows × experts.

Experts are computed with in packed form: actor and critic read the same observation, so their first
layers are one matrix, and one wide product does the work of two narrow ones. Rows are sorted by
expert and cut into tiles of one expert each, and a loop goes over the tiles in use.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from flowrl.config import Precision
from flowrl.networks.moe import ACTIVATIONS, Params, take_expert
from flowrl.runs import LAYERS

_LEAST, _MOST, _MULTIPLE = 8, 160, 8  # rows of a tile
_MOST_LEARNT = 600  # in learning, where a tile's gradient is added to that of all experts
_SHARES = (0.5, 0.875, 1.0)  # of a full tile: the sizes in which tiles are computed


class Dense(NamedTuple):
    """One layer; with a leading axis `[E, …]` where experts are stacked."""

    kernel: jax.Array  # f32[inputs, outputs]
    bias: jax.Array  # f32[outputs]


class Packed(NamedTuple):
    """An expert's parameters, or stacked ones `[E, …]`, as they are computed with."""

    first: Dense  # kernel f32[observation, 2 × layer_size]: actor | critic
    actor: tuple[Dense, ...]
    critic: tuple[Dense, ...]
    trunk: tuple[Dense, ...] = ()  # of experts that see a grid; f32[rows, columns, in, out]


def pack(stacked: Params) -> Packed:
    """The packed form of parameters as `moe` has them, leaves `[E, …]`."""
    actor, critic = stacked["actor"], stacked["critic"]
    first = [
        jnp.concatenate([actor[LAYERS[0]][k], critic[LAYERS[0]][k]], -1) for k in Dense._fields
    ]
    rest = [tuple(Dense(**net[layer]) for layer in LAYERS[1:]) for net in (actor, critic)]
    trunk = (Dense(**stacked["trunk"]["conv"]),) if "trunk" in stacked else ()
    return Packed(Dense(*first), *rest, trunk=trunk)


def in_precision(tree: Any, precision: Precision) -> Any:
    """A tree of f32 arrays of any shape in the type that networks are computed in."""
    dtype = {"f32": jnp.float32, "bf16": jnp.bfloat16}[precision]
    return jax.tree.map(lambda leaf: leaf.astype(dtype), tree)


def pad_experts(packed: Packed, num_experts: int) -> Packed:
    """Experts with leaves `[E, …]`, and blank ones after them that make up `num_experts`."""

    def pad(leaf: jax.Array) -> jax.Array:
        blank = jnp.zeros((num_experts - leaf.shape[0], *leaf.shape[1:]), leaf.dtype)
        return jnp.concatenate([leaf, blank])

    return jax.tree.map(pad, packed)


def unpack(packed: Packed) -> Params:
    """The inverse of `pack`, bit for bit; leaves `[E, …]`."""
    halves = [jnp.split(leaf, 2, axis=-1) for leaf in packed.first]
    nets = []
    for number, rest in enumerate((packed.actor, packed.critic)):
        layers = [Dense(*(half[number] for half in halves)), *rest]
        nets.append({name: layer._asdict() for name, layer in zip(LAYERS, layers, strict=True)})
    params: Params = {"actor": nets[0], "critic": nets[1]}
    for layer in packed.trunk:
        params["trunk"] = {"conv": layer._asdict()}
    return params


def forward(one: Packed, obs: jax.Array, *, activation: str) -> tuple[jax.Array, jax.Array]:
    """One expert's logits f32 `[B, actions]` and values f32 `[B]` of observations `[B, size]`.

    Those of an expert with a trunk are grids `[B, rows, columns, channels]`. It computes what
    `moe.ActorCritic` does, with the first layers as one, in the type of the parameters; the output
    layers add up in f32.
    """
    act, obs = ACTIVATIONS[activation], obs.astype(one.first.kernel.dtype)
    product = partial(jnp.matmul, preferred_element_type=jnp.float32)
    for layer in one.trunk:
        obs = act(_convolved(obs, layer)).reshape(obs.shape[0], -1)
    actor, critic = jnp.split(act(obs @ one.first.kernel + one.first.bias), 2, axis=-1)
    for layer in one.actor[:-1]:
        actor = act(actor @ layer.kernel + layer.bias)
    for layer in one.critic[:-1]:
        critic = act(critic @ layer.kernel + layer.bias)
    logits = product(actor, one.actor[-1].kernel) + one.actor[-1].bias
    value = product(critic, one.critic[-1].kernel) + one.critic[-1].bias
    return logits, value[..., 0]


def _convolved(grid: jax.Array, layer: Dense) -> jax.Array:
    """The convolution of grids `[B, rows, columns, in]`, as large: `[B, rows, columns, out]`.

    As one product: XLA:CPU takes 28 times as long for a convolution's gradient within a loop.
    """
    rows, columns = grid.shape[1:3]
    high, wide, _, filters = layer.kernel.shape
    edges = [(0, 0), *(((size - 1) // 2, size // 2) for size in (high, wide)), (0, 0)]
    padded = jnp.pad(grid, edges)
    places = [(row, column) for row in range(high) for column in range(wide)]
    near = [padded[:, row : row + rows, column : column + columns] for row, column in places]
    return jnp.concatenate(near, axis=-1) @ layer.kernel.reshape(-1, filters) + layer.bias


class Tiles(NamedTuple):
    """Rows sorted by expert and cut into tiles; tile i is `order[start[i] : stop[i]]`."""

    order: jax.Array  # int32[B + size], padded so that every slice of `size` is inside
    expert: jax.Array  # int32[most tiles + 1]
    start: jax.Array  # int32[most tiles + 1]
    stop: jax.Array  # likewise; of a tile not in use it is its start; the last is never in use
    count: jax.Array  # int32, tiles in use


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
    """Cut rows of the experts int32 `[B]` into tiles of one expert and at most `size` rows."""
    num_rows = expert.shape[0]
    counts = jnp.bincount(expert, length=num_experts)
    needed = (counts + size - 1) // size
    tile_stops, row_stops = jnp.cumsum(needed), jnp.cumsum(counts)
    number = jnp.arange(num_rows // size + num_experts + 1, dtype=jnp.int32)
    owner = jnp.searchsorted(tile_stops, number, side="right").clip(0, num_experts - 1)
    start = (row_stops - counts)[owner] + (number - (tile_stops - needed)[owner]) * size
    stop = jnp.where(number < tile_stops[-1], jnp.minimum(start + size, row_stops[owner]), start)
    # Experts and rows as one number: XLA:CPU sorts that in a third of the time of two.
    keys = expert * num_rows + jnp.arange(num_rows, dtype=jnp.int32)
    order = jnp.pad(jax.lax.sort(keys, is_stable=False) % num_rows, (0, size))
    return Tiles(order, owner.astype(jnp.int32), start, stop, tile_stops[-1])


def apply(packed: Packed, obs: jax.Array, expert: jax.Array, *, activation: str):
    """Logits f32 `[B, actions]` and values f32 `[B]`, tile by tile.

    When one expert acts in all rows, as in the first steps of a plan, it is evaluated once. The
    arguments are those of `dispatch.apply`.
    """
    return jax.lax.cond(
        (expert == expert[0]).all(),
        lambda: forward(take_expert(packed, expert[0]), obs, activation=activation),
        lambda: _apply_each(packed, obs, expert, activation=activation),
    )


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
    a loop of unknown length is impossible. Losses and figures are those of all rows at once. The
    arguments are those of `dispatch.evaluate_rows`; the gradient has the form of `packed`.
    """
    num_rows, num_experts = index.shape[0], packed.first.kernel.shape[0]
    size = tile_size(num_rows, num_experts, _MOST_LEARNT)
    tiles = tiles_of(rows.expert[index], num_experts=num_experts, size=size)
    longest_first = jnp.argsort(tiles.start - tiles.stop)
    tiles = Tiles(
        order=index[tiles.order],
        expert=tiles.expert[longest_first],
        start=tiles.start[longest_first],
        stop=tiles.stop[longest_first],
        count=tiles.count,
    )

    def tile_loss(one: Packed, chosen: Any, inside: jax.Array):
        output = forward(one, chosen.obs, activation=activation)
        loss, _ = row_loss(*output, chosen)
        return jnp.where(inside, loss, 0.0).sum() / num_rows, output

    def of_tile(number: jax.Array, rows_in: jax.Array, computed: int) -> Any:
        row = jax.lax.dynamic_slice(tiles.order, (tiles.start[number],), (computed,))
        inside = jnp.arange(computed) < rows_in
        # Filled up with a row of its own: another expert's could overflow, and 0 × inf is NaN.
        chosen = jax.tree.map(lambda leaf: leaf[jnp.where(inside, row, row[0])], rows)
        one = take_expert(packed, tiles.expert[number])
        grads, output = jax.grad(tile_loss, has_aux=True)(one, chosen, inside)
        return grads, jax.tree.map(partial(_padded, size=size), (row, *output))

    num_actions, most = packed.actor[-1].bias.shape[-1], num_rows + size
    blank = jnp.zeros(most, jnp.int32), jnp.zeros((most, num_actions)), jnp.zeros(most)
    total = jax.tree.map(jnp.zeros_like, packed), blank
    grads, outputs = _sum_of_pairs(of_tile, tiles, total, size=size)
    row, *output = (leaf[:num_rows] for leaf in outputs)
    each = row_loss(*output, jax.tree.map(lambda leaf: leaf[row], rows))
    return *jax.tree.map(jnp.mean, each), grads


def _sum_of_pairs(of_tile: Callable[..., Any], tiles: Tiles, total: Any, *, size: int) -> Any:
    """Add the gradients of all tiles to `total[0]`, and write their outputs into `total[1]`.

    XLA:CPU runs a tile's small products on one core; two tiles that do not depend on one another
    have one each. Both are computed in the least size that holds the first, which is the longer. If
    the last tile has no partner, it is computed twice, the second time without any row.
    """
    length = tiles.stop - tiles.start
    place = jnp.cumsum(length) - length
    sizes = sorted({max(1, int(share * size) // _MULTIPLE) * _MULTIPLE for share in _SHARES})

    def add_pair(number: jax.Array, total: Any) -> Any:
        first, second = 2 * number, 2 * number + 1
        partner = jnp.where(length[second] > 0, second, first)

        def of_pair(computed: int) -> Any:
            one = of_tile(first, length[first], computed)
            return one, of_tile(partner, length[second], computed)

        least = jnp.searchsorted(jnp.asarray(sizes), length[first])
        results = jax.lax.switch(least, [partial(of_pair, computed) for computed in sizes])
        for tile, (grads, output) in zip((first, second), results, strict=True):
            add, put = partial(_added, at=tiles.expert[tile]), partial(_written, at=place[tile])
            total = jax.tree.map(add, total[0], grads), jax.tree.map(put, total[1], output)
        return total

    return jax.lax.fori_loop(0, (tiles.count + 1) // 2, add_pair, total)


def _added(whole: jax.Array, part: jax.Array, *, at: jax.Array) -> jax.Array:
    return whole.at[at].add(part)


def _written(whole: jax.Array, part: jax.Array, *, at: jax.Array) -> jax.Array:
    # What is beyond the tile's rows is overwritten by the next tile.
    return jax.lax.dynamic_update_slice_in_dim(whole, part, at, axis=0)


def _padded(leaf: jax.Array, *, size: int) -> jax.Array:
    return jnp.pad(leaf, ((0, size - leaf.shape[0]), *[(0, 0)] * (leaf.ndim - 1)))
