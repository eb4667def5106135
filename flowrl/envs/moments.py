"""Moments of both games, kept with the package: the features that skill code is tried on.

Half of them were played: fresh worlds and some that a random player has been in for a while. The
other half has the bags, achievements, positions and needs that a random player never sees, drawn
at random within the game's bounds, and last come a moment of zeros and one of the largest values.
`scripts/write_moments.py` makes the files.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from flowrl.skills.games import table_of

FOLDER = Path(__file__).parent / "moments"
_STATES = {
    "craftax.craftax_classic": "craftax.craftax_classic.envs.craftax_state",
    "craftax.craftax": "craftax.craftax.craftax_state",
}


def moments_file(env_name: str) -> Path:
    """Where the moments of a game are kept."""
    return FOLDER / f"{table_of(env_name).folder}.npz"


@functools.cache
def moments(env_name: str) -> Mapping[str, Any]:
    """Every feature by name, leaves `[moments, …]`; inventories are Craftax's own."""
    with np.load(moments_file(env_name), allow_pickle=False) as file:
        leaves = {name: file[name] for name in file.files}
    inventory = importlib.import_module(_STATES[table_of(env_name).package]).Inventory
    features: dict[str, Any] = {name: leaf for name, leaf in leaves.items() if "." not in name}
    for bag in ("inventory", "inventory_diff"):
        items = {item.name: leaves[f"{bag}.{item.name}"] for item in dataclasses.fields(inventory)}
        features[bag] = inventory(**items)
    return features


def flat(features: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The features as arrays under the names of their leaves."""
    leaves: dict[str, np.ndarray] = {}
    for name, value in features.items():
        if dataclasses.is_dataclass(value):
            for item in dataclasses.fields(value):
                leaves[f"{name}.{item.name}"] = np.asarray(getattr(value, item.name))
        else:
            leaves[name] = np.asarray(value)
    return leaves


def shape_of_one(features: Mapping[str, Any]) -> dict[str, Any]:
    """The features of one moment as shapes and types, to trace with."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), dict(features)
    )
