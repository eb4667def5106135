"""Rows to experts: every row is evaluated by the one expert that acts in it.

Three ways, with the same values and gradients:

* one expert: a plain network;
* tiles (CPU): rows are sorted by expert and cut into tiles of one expert each, so the cost is
  that of the rows and not of rows × experts. Gradients are taken tile by tile and added up,
  since reverse-mode differentiation through a loop of unknown length is impossible;
* dense (elsewhere, and the oracle of the tests): every expert evaluates every row, then the
  acting one is selected.

All work on the packed form of the parameters, in which the first layers of actor and critic,
which read the same observation, are one matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from flowrl.models.actor_critic import Params, take_expert
from flowrl.models.shapes import LAYERS

Method = Literal["plain", "tiles", "dense"]
_ACTIVATIONS = {"tanh": jnp.tanh, "relu": jax.nn.relu, "gelu": jax.nn.gelu}
_TILE_LEAST, _TILE_MOST = 16, 128


class Dense(NamedTuple):
    """One layer; with a leading axis for experts where they are stacked."""

    kernel: jax.Array
    bias: jax.Array


class Packed(NamedTuple):
    """Parameters as they are computed with."""

    first: Dense  # kernel [observation, 2 × layer_size]: actor | critic
    actor: tuple[Dense, ...]
    critic: tuple[Dense, ...]


class Evaluation(NamedTuple):
    """Loss over a set of rows, and what it asks of each expert."""

    loss: jax.Array  # mean over all rows
    figures: dict[str, jax.Array]  # means over all rows
    grads: Packed
    rows: jax.Array  # int32[E], rows of each expert


class Tiles(NamedTuple):
    """Rows sorted by expert and cut into tiles; tile i is `order[start[i] : stop[i]]`."""

    order: jax.Array  # int32[B + size], padded so that every slice of `size` is inside
    expert: jax.Array  # int32[most tiles]
    start: jax.Array
    stop: jax.Array
    count: jax.Array  # tiles in use


def pack(stacked: Params) -> Packed:
    """The packed form of stacked parameters."""
    actor, critic = stacked["actor"], stacked["critic"]
    first = [
        jnp.concatenate([actor[LAYERS[0]][k], critic[LAYERS[0]][k]], -1) for k in Dense._fields
    ]
    rest = [tuple(Dense(**net[layer]) for layer in LAYERS[1:]) for net in (actor, critic)]
    return Packed(Dense(*first), *rest)


def widened(packed: Packed, num_experts: int) -> Packed:
    """The same experts, and blank ones after them that make up `num_experts`."""

    def widen(leaf: jax.Array) -> jax.Array:
        blank = jnp.zeros((num_experts - leaf.shape[0], *leaf.shape[1:]), leaf.dtype)
        return jnp.concatenate([leaf, blank])

    return jax.tree.map(widen, packed)


def unpack(packed: Packed) -> Params:
    """The inverse of `pack`, bit for bit."""
    halves = [jnp.split(leaf, 2, axis=-1) for leaf in packed.first]
    nets = []
    for number, rest in enumerate((packed.actor, packed.critic)):
        layers = [Dense(*(half[number] for half in halves)), *rest]
        nets.append({name: layer._asdict() for name, layer in zip(LAYERS, layers, strict=True)})
    return {"actor": nets[0], "critic": nets[1]}


def apply(
    stacked: Params, obs: jax.Array, expert: jax.Array, *, activation: str = "tanh"
) -> tuple[jax.Array, jax.Array]:
    """Logits `[B, actions]` and values `[B]` of observations `[B, …]`, by the acting experts."""
    return apply_packed(pack(stacked), obs, expert, activation=activation)


def apply_packed(
    packed: Packed,
    obs: jax.Array,
    expert: jax.Array,
    *,
    activation: str,
    method: Method | None = None,
) -> tuple[jax.Array, jax.Array]:
    """As `apply`; the method is chosen by platform when it is not given."""
    match method or _best_method(packed):
        case "plain":
            return forward(take_expert(packed, 0), obs, activation=activation)
        case "dense":
            return _apply_dense(packed, obs, expert, activation=activation)
        case "tiles":
            return _apply_tiles(packed, obs, expert, activation=activation)


def evaluate_rows(
    packed: Packed,
    rows: Any,
    index: jax.Array,
    *,
    row_loss: Callable[[jax.Array, jax.Array, Any], tuple[jax.Array, dict[str, jax.Array]]],
    activation: str,
    method: Method | None = None,
) -> Evaluation:
    """Mean loss over some rows, and its gradient.

    Args:
      packed: parameters of E experts.
      rows: a tree of leaves `[N, …]` with attributes `obs` and `expert`.
      index: int32 `[M]`, the rows to take.
      row_loss: from logits `[B, A]`, values `[B]` and B rows to losses `[B]` and named
        figures `[B]`, each row by itself.
      activation: of the hidden layers.
      method: chosen by platform when it is not given.
    """
    counts = jnp.bincount(rows.expert[index], length=packed.first.kernel.shape[0])
    method = method or _best_method(packed)
    if method == "tiles":
        loss, figures, grads = _evaluate_tiles(
            packed, rows, index, row_loss=row_loss, activation=activation
        )
        return Evaluation(loss, figures, grads, counts)
    chosen = jax.tree.map(lambda leaf: leaf[index], rows)

    def mean_loss(packed: Packed) -> tuple[jax.Array, dict[str, jax.Array]]:
        logits, value = apply_packed(
            packed, chosen.obs, chosen.expert, activation=activation, method=method
        )
        return jax.tree.map(jnp.mean, row_loss(logits, value, chosen))

    (loss, figures), grads = jax.value_and_grad(mean_loss, has_aux=True)(packed)
    return Evaluation(loss, figures, grads, counts)


def forward(one: Packed, obs: jax.Array, *, activation: str) -> tuple[jax.Array, jax.Array]:
    """One expert's logits `[B, actions]` and values `[B]`."""
    act = _ACTIVATIONS[activation]
    actor, critic = jnp.split(act(obs @ one.first.kernel + one.first.bias), 2, axis=-1)
    for layer in one.actor[:-1]:
        actor = act(actor @ layer.kernel + layer.bias)
    for layer in one.critic[:-1]:
        critic = act(critic @ layer.kernel + layer.bias)
    logits = actor @ one.actor[-1].kernel + one.actor[-1].bias
    value = critic @ one.critic[-1].kernel + one.critic[-1].bias
    return logits, value[..., 0]


def tiles_of(expert: jax.Array, *, num_experts: int) -> Tiles:
    """Sort rows by expert and cut them into tiles of one expert each.

    The size of a tile is the power of two next to rows / experts, between 16 and 128.
    """
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


def tile_size(num_rows: int, num_experts: int) -> int:
    """Rows per tile."""
    share = max(1, num_rows // num_experts)
    return min(_TILE_MOST, max(_TILE_LEAST, 1 << (share - 1).bit_length()))


def _best_method(packed: Packed) -> Method:
    if packed.first.kernel.shape[0] == 1:
        return "plain"
    return "tiles" if jax.default_backend() == "cpu" else "dense"


def _apply_dense(packed: Packed, obs: jax.Array, expert: jax.Array, *, activation: str):
    logits, values = jax.vmap(lambda one: forward(one, obs, activation=activation))(packed)
    row = jnp.arange(obs.shape[0])
    return logits[expert, row], values[expert, row]


def _apply_tiles(packed: Packed, obs: jax.Array, expert: jax.Array, *, activation: str):
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


def _evaluate_tiles(packed: Packed, rows: Any, index: jax.Array, *, row_loss, activation: str):
    num_rows, num_experts = index.shape[0], packed.first.kernel.shape[0]
    size = tile_size(num_rows, num_experts)
    tiles = tiles_of(rows.expert[index], num_experts=num_experts)

    def tile_loss(one: Packed, chosen: Any, inside: jax.Array):
        logits, value = forward(one, chosen.obs, activation=activation)
        each = row_loss(logits, value, chosen)
        return jax.tree.map(lambda x: jnp.where(inside, x, 0.0).sum() / num_rows, each)

    def add_tile(number: jax.Array, total: Any) -> Any:
        start, owner = tiles.start[number], tiles.expert[number]
        place = start + jnp.arange(size)
        inside = place < tiles.stop[number]
        # Filled up with a row of its own: another expert's could overflow, and 0 × inf is NaN.
        row = index[tiles.order[jnp.where(inside, place, start)]]
        chosen = jax.tree.map(lambda leaf: leaf[row], rows)
        one = take_expert(packed, owner)
        sums, grads = jax.value_and_grad(tile_loss, has_aux=True)(one, chosen, inside)
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
