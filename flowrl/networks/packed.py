"""Parameters as they are computed with: the first layers of actor and critic are one matrix.

Both read the same observation, so one wide product does the work of two narrow ones.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from flowrl.networks.actor_critic import Params
from flowrl.networks.shapes import LAYERS

_ACTIVATIONS = {"tanh": jnp.tanh, "relu": jax.nn.relu, "gelu": jax.nn.gelu}


class Dense(NamedTuple):
    """One layer; with a leading axis for experts where they are stacked."""

    kernel: jax.Array
    bias: jax.Array


class Packed(NamedTuple):
    """Parameters as they are computed with."""

    first: Dense  # kernel [observation, 2 × layer_size]: actor | critic
    actor: tuple[Dense, ...]
    critic: tuple[Dense, ...]


def pack(stacked: Params) -> Packed:
    """The packed form of stacked parameters."""
    actor, critic = stacked["actor"], stacked["critic"]
    first = [
        jnp.concatenate([actor[LAYERS[0]][k], critic[LAYERS[0]][k]], -1) for k in Dense._fields
    ]
    rest = [tuple(Dense(**net[layer]) for layer in LAYERS[1:]) for net in (actor, critic)]
    return Packed(Dense(*first), *rest)


def pad_experts(packed: Packed, num_experts: int) -> Packed:
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
