"""From the parameter trees of the original to the leaves of flowrl's experts.

The original keeps a pair of networks per expert, `actor_networks_3` and `critic_networks_3`, each a
sequence of layers, `layers_0`, `layers_2`, … with an activation between them, each layer with the
`kernel` and `bias` of flax. flowrl's layers are numbered without gaps and have the same two arrays
in the same orientation, so that nothing is transposed. Keys are matched whole, never by prefix.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from flowrl.errors import ExpertShapeError
from flowrl.migration.stored import StoredArray, StoredDtype
from flowrl.models.shapes import HIDDEN_LAYERS, LAYERS, expert_shapes
from flowrl.skills.games import GAMES

PARTS = ("actor", "critic")
MOST_EXPERTS = 1_000
_NUMBERED = re.compile(r"(actor|critic)(?:_networks)?_(0|[1-9]\d{0,5})")
_LAYER = re.compile(r"(?:layers|[Dd]ense)_(\d{1,4})")
_KINDS = {"kernel", "bias"}
Network = Mapping[str, Any]  # "actor", "critic" → layers, as they are stored


class Leaf(Protocol):
    """An array that is not read yet."""

    @property
    def shape(self) -> tuple[int, ...]:
        """As it is stored."""
        ...

    @property
    def dtype(self) -> Any:
        """Of its numbers, as its source says it."""
        ...


@dataclass(frozen=True, slots=True)
class Sizes:
    """What an expert was made for."""

    env_name: str
    layer_size: int


@dataclass(frozen=True, slots=True)
class Leaves:
    """One expert's arrays by flowrl's names, their shapes known to fit."""

    sizes: Sizes
    stored: Mapping[str, Leaf]


def numbered_networks(tree: Any, place: str) -> dict[int, Network]:
    """The networks of every expert in a tree, by the number in their key.

    Raises:
      ExpertShapeError: there are none, too many, or one without its actor or its critic.
    """
    found: dict[int, dict[str, Any]] = {}
    for key, layers in _root(tree).items():
        match = _NUMBERED.fullmatch(key) if isinstance(key, str) else None
        if match is not None:
            found.setdefault(int(match[2]), {})[match[1]] = layers
    if not found or len(found) > MOST_EXPERTS:
        raise ExpertShapeError(
            f"{place} holds {len(found)} experts, from 1 to {MOST_EXPERTS} can be migrated; "
            "is it a checkpoint of the original's mixture of experts?"
        )
    for number, network in found.items():
        for part in PARTS:
            if part not in network:
                raise ExpertShapeError(f"{place}: expert {number} has no {part}; restore the file")
    return dict(sorted(found.items()))


def sole_network(tree: Any, expert: int, place: str) -> Network:
    """The networks in the file of one expert, which may carry the expert's number or none.

    Raises:
      ExpertShapeError: there are none, or several and none of them is this expert's.
    """
    root = _root(tree)
    if all(f"{part}_network" in root for part in PARTS):
        return {part: root[f"{part}_network"] for part in PARTS}
    found = numbered_networks(tree, place)
    if expert in found:
        return found[expert]
    if len(found) == 1:
        return next(iter(found.values()))
    raise ExpertShapeError(
        f"{place} holds the experts {sorted(found)} and not expert {expert}; restore the file"
    )


def leaves_of(network: Network, place: str) -> Leaves:
    """The arrays of one expert by flowrl's names, once they have the shapes of one of its games.

    Raises:
      ExpertShapeError: the layers are others, with the layer, its shape and the one it needs.
    """
    layers = {part: _layers(network[part], part, place) for part in PARTS}
    first, last = layers["actor"][0], layers["actor"][-1]
    sizes = _sizes(_shape(first[1]["kernel"]), _shape(last[1]["kernel"]), place)
    game = GAMES[sizes.env_name]
    wanted = expert_shapes(game.observation_size, game.num_actions, sizes.layer_size)
    stored: dict[str, Leaf] = {}
    for part in PARTS:
        for ours, (theirs, arrays) in zip(LAYERS, layers[part], strict=True):
            for kind in sorted(_KINDS):
                name = f"{part}/{ours}/{kind}"
                _check(arrays[kind], wanted[name], f"{place}: {part} {theirs}/{kind}", sizes)
                stored[name] = arrays[kind]
    return Leaves(sizes, stored)


def numbers(leaf: StoredArray) -> np.ndarray:
    """A stored array as float32, in the usual order of its numbers."""
    if leaf.raw is None or leaf.dtype is None:
        raise ExpertShapeError("an array without content cannot be migrated; restore the file")
    order = "<" if leaf.dtype.order in "=|" else leaf.dtype.order
    flat = np.frombuffer(leaf.raw, np.dtype(order + leaf.dtype.code))
    array = flat.reshape(leaf.shape, order="F" if leaf.fortran else "C")
    return np.ascontiguousarray(array, dtype=np.float32)


def nested(leaves: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Arrays by flowrl's names as the tree that an expert's checkpoint holds."""
    tree: dict[str, Any] = {}
    for name, array in leaves.items():
        part, layer, kind = name.split("/")
        tree.setdefault(part, {}).setdefault(layer, {})[kind] = array
    return tree


def unusable(leaves: Mapping[str, np.ndarray]) -> str | None:
    """Why an expert with these arrays cannot act, None when it can."""
    for name, array in leaves.items():
        if not np.isfinite(array).all():
            return f"{name} is not finite: it holds NaN or infinity"
        if name.endswith("/kernel") and not array.any():
            return f"{name} is zero everywhere: its file is lost, or was never written"
    return None


def _root(tree: Any) -> Mapping[Any, Any]:
    """The level at which the networks are, below as many `params` as there are."""
    for _ in range(4):
        if not isinstance(tree, dict) or "params" not in tree:
            break
        tree = tree["params"]
    return tree if isinstance(tree, dict) else {}


def _layers(stored: Any, part: str, place: str) -> list[tuple[str, Mapping[str, Leaf]]]:
    found: dict[int, tuple[str, Mapping[str, Leaf]]] = {}
    for key, arrays in (stored if isinstance(stored, dict) else {}).items():
        match = _LAYER.fullmatch(key) if isinstance(key, str) else None
        plain = isinstance(arrays, dict) and arrays.keys() == _KINDS
        if match is None or not plain or int(match[1]) in found:
            raise ExpertShapeError(
                f"{place}: {part} has {_said(key)}, which is no dense layer with a kernel and a "
                "bias; flowrl's networks have no other, train the skill again"
            )
        found[int(match[1])] = (str(key), arrays)
    if len(found) != HIDDEN_LAYERS + 1:
        names = ", ".join(found[number][0] for number in sorted(found)) or "none"
        raise ExpertShapeError(
            f"{place}: {part} has {len(found)} layers ({names}), flowrl's networks have "
            f"{HIDDEN_LAYERS + 1}; train the skill again"
        )
    return [found[number] for number in sorted(found)]


def _sizes(first: tuple[int, ...], last: tuple[int, ...], place: str) -> Sizes:
    for game in GAMES.values():
        inputs_fit = len(first) == 2 and first[0] == game.observation_size
        if inputs_fit and len(last) == 2 and last[1] == game.num_actions and first[1] > 0:
            return Sizes(game.env_name, first[1])
    known = ", ".join(
        f"{game.env_name} ({game.observation_size} → {game.num_actions})" for game in GAMES.values()
    )
    raise ExpertShapeError(
        f"{place}: the actor's first kernel has shape {_said(first)} and its last {_said(last)}, "
        f"which fits no game of flowrl: {known}"
    )


def _check(leaf: Any, wanted: tuple[int, ...], place: str, sizes: Sizes) -> None:
    if _shape(leaf) != wanted:
        raise ExpertShapeError(
            f"{place} has shape {_said(_shape(leaf))}, a network of width {sizes.layer_size} for "
            f"{sizes.env_name} needs {wanted}; train the skill again"
        )
    code = leaf.dtype.code if isinstance(leaf.dtype, StoredDtype) else np.dtype(leaf.dtype).str[1:]
    if code != "f4":
        raise ExpertShapeError(f"{place} holds {code} numbers, flowrl's experts hold float32 (f4)")


def _shape(leaf: Any) -> tuple[int, ...]:
    """The shape of a leaf; empty for what is no array."""
    known = hasattr(leaf, "shape") and hasattr(leaf, "dtype") and leaf.dtype is not None
    return tuple(leaf.shape) if known else ()


def _said(value: Any) -> str:
    """A name or shape of a stranger's file, short and printable."""
    return repr(value)[:80] if isinstance(value, str | tuple) else f"a {type(value).__name__}"
