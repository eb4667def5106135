"""One expert as a flax module: an actor and a critic of three hidden layers each.

An expert that sees a grid of cells has a trunk below both, one convolution.

A mixture is E experts of which one acts at a time; their parameters are stacked, leaves `[E, …]`.
The leaf paths (`actor/dense_0/kernel`, …) are those on disk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from flowrl.games.base import ObservationSize
from flowrl.runs import FILTERS, KERNEL, LAYERS

Params = dict[str, dict[str, dict[str, Any]]]  # net → layer → kernel or bias
Initializer = Callable[..., Any]  # of a random key, a shape and a type
ACTIVATIONS = {"tanh": nn.tanh, "relu": nn.relu, "gelu": nn.gelu}
_GAIN_HIDDEN = float(np.sqrt(2))


class Layers(nn.Module):
    """Hidden layers of one width, and an output layer."""

    outputs: int
    output_gain: float
    layer_size: int
    activation: str
    kernel_init: Callable[[float], Initializer]

    @nn.compact
    def __call__(self, values: jax.Array) -> jax.Array:
        """Outputs f32 `[B, outputs]` of inputs f32 `[B, inputs]`."""
        for name in LAYERS[:-1]:
            layer = nn.Dense(self.layer_size, kernel_init=self.kernel_init(_GAIN_HIDDEN), name=name)
            values = ACTIVATIONS[self.activation](layer(values))
        kernel_init = self.kernel_init(self.output_gain)
        return nn.Dense(self.outputs, kernel_init=kernel_init, name=LAYERS[-1])(values)


class Trunk(nn.Module):
    """A convolution over the cells of a grid."""

    activation: str
    kernel_init: Callable[[float], Initializer]

    @nn.compact
    def __call__(self, grid: jax.Array) -> jax.Array:
        """Numbers f32 `[B, inputs]` of grids f32 `[B, rows, columns, channels]`."""
        layer = nn.Conv(FILTERS, KERNEL, kernel_init=self.kernel_init(_GAIN_HIDDEN), name="conv")
        return ACTIVATIONS[self.activation](layer(grid)).reshape(grid.shape[0], -1)


class ActorCritic(nn.Module):
    """One expert; weights are orthogonal, with gain √2, and 0.01 and 1 in the output layers."""

    num_actions: int
    layer_size: int
    activation: str = "tanh"
    kernel_init: Callable[[float], Initializer] = nn.initializers.orthogonal

    @nn.compact
    def __call__(self, obs: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Logits f32 `[B, actions]` and values f32 `[B]` of observations.

        They are f32 `[B, size]`, or of grids `[B, rows, columns, channels]`.
        """
        common = (self.layer_size, self.activation, self.kernel_init)
        if obs.ndim > 2:
            obs = Trunk(self.activation, self.kernel_init, name="trunk")(obs)
        logits = Layers(self.num_actions, 0.01, *common, name="actor")(obs)
        value = Layers(1, 1.0, *common, name="critic")(obs)
        return logits, value[:, 0]


def init_expert(
    network: ActorCritic, words: np.ndarray, *, observation_size: ObservationSize
) -> Params:
    """One expert's fresh parameters, NumPy arrays of the shapes that `expert_shapes` says.

    `words` uint32 `[2]` are those of its random key.

    The weights are drawn by NumPy, one layer after another: there is nothing to compile, and
    batched QR decompositions under jit can hang on a CPU.
    """
    rng = np.random.default_rng(words)
    network = network.clone(kernel_init=partial(_orthogonal, rng))
    no_key = jax.eval_shape(jax.random.key, 0)
    shape = observation_size if isinstance(observation_size, tuple) else (observation_size,)
    obs = jax.ShapeDtypeStruct((1, *shape), jnp.float32)
    variables = network.lazy_init(no_key, obs)
    return jax.tree.map(np.asarray, variables["params"])


def stack_experts(experts: Sequence[Any]) -> Any:
    """One tree with leaves `[E, …]` from the trees of E experts."""
    return jax.tree.map(lambda *leaves: jnp.stack([jnp.asarray(x) for x in leaves]), *experts)


def take_expert(stacked: Any, local: int | jax.Array) -> Any:
    """The tree of the expert with this local index, from leaves `[E, …]`."""
    return jax.tree.map(lambda leaf: leaf[local], stacked)


def _orthogonal(rng: np.random.Generator, gain: float) -> Initializer:
    """An initializer of matrices with orthonormal rows or columns, uniform over all (Haar).

    A kernel of more than two axes is the matrix whose columns are its last axis.
    """

    def init(key: jax.Array, shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
        rows, columns = math.prod(shape[:-1]), shape[-1]
        normal = rng.standard_normal((max(rows, columns), min(rows, columns)))
        q, r = np.linalg.qr(normal)
        q = q * np.sign(np.diag(r))  # makes the decomposition unique, hence q uniform
        return (gain * (q if rows >= columns else q.T)).astype(np.float32).reshape(shape)

    return init
