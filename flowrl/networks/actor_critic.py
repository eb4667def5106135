"""Actor and critic of each expert: two plain networks of three hidden layers.

Parameters are nested dicts of arrays rather than a module of a neural-network library: they are
what lies on disk, stacking experts is one `tree.map`, and there is no state beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flowrl.networks.shapes import HIDDEN_LAYERS, LAYERS, expert_shapes

Params = dict[str, dict[str, dict[str, Any]]]  # net → layer → kernel or bias
_GAIN_HIDDEN = float(np.sqrt(2))
_GAIN_OUT = {"actor": 0.01, "critic": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorCriticMoE:
    """The sizes of a mixture of experts of which one acts at a time."""

    num_experts: int
    observation_size: int
    num_actions: int
    layer_size: int
    activation: str = "tanh"

    @property
    def expert_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every leaf of one expert, by its path."""
        return expert_shapes(self.observation_size, self.num_actions, self.layer_size)

    def init_expert(self, key: jax.Array | np.ndarray) -> Params:
        """One expert's fresh parameters."""
        return init_expert(
            key,
            observation_size=self.observation_size,
            num_actions=self.num_actions,
            layer_size=self.layer_size,
        )

    def init(self, key: jax.Array) -> Params:
        """Fresh parameters of all experts, each from its own key; leaves `[E, …]`."""
        keys = jax.random.split(key, self.num_experts)
        return stack_experts([self.init_expert(key) for key in keys])


def init_expert(
    key: jax.Array | np.ndarray, *, observation_size: int, num_actions: int, layer_size: int
) -> Params:
    """Orthogonal weights (gain √2; last layer 0.01 for the actor, 1 for the critic), zero biases.

    Drawn by NumPy: nothing to compile, and batched QR decompositions under jit can hang on CPU.
    """
    rng = np.random.default_rng(_words(key).ravel())
    params: Params = {"actor": {}, "critic": {}}
    for path, shape in expert_shapes(observation_size, num_actions, layer_size).items():
        net, layer, kind = path.split("/")
        gain = _GAIN_OUT[net] if layer == LAYERS[HIDDEN_LAYERS] else _GAIN_HIDDEN
        leaf = gain * _orthogonal(rng, shape) if kind == "kernel" else np.zeros(shape)
        params[net].setdefault(layer, {})[kind] = leaf.astype(np.float32)
    return params


def stack_experts(experts: Sequence[Any]) -> Any:
    """One tree with leaves `[E, …]` from the trees of E experts."""
    return jax.tree.map(lambda *leaves: jnp.stack([jnp.asarray(x) for x in leaves]), *experts)


def take_expert(stacked: Any, local: int | jax.Array) -> Any:
    """The tree of the expert with this local index."""
    return jax.tree.map(lambda leaf: leaf[local], stacked)


def _orthogonal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """A matrix with orthonormal rows or columns, uniform over all such (Haar)."""
    rows, columns = shape
    normal = rng.standard_normal((max(shape), min(shape)))
    q, r = np.linalg.qr(normal)
    q = q * np.sign(np.diag(r))  # makes the decomposition unique, hence q uniform
    return q if rows >= columns else q.T


def _words(key: jax.Array | np.ndarray) -> np.ndarray:
    """The words of a random key, which may be given as them."""
    if isinstance(key, np.ndarray):
        return key
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(key) if typed else key)
