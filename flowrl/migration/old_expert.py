"""An expert of the original before its arrays are read, and where they lie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flowrl import checkpoints
from flowrl.errors import ExpertShapeError
from flowrl.migration.networks import Leaf, Leaves, numbers
from flowrl.migration.stored import StoredArray


@dataclass(frozen=True, slots=True)
class OrbaxLeaf:
    """An array in an Orbax folder, by its path in the tree there."""

    path: str
    shape: tuple[int, ...]
    dtype: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class OldExpert:
    """One expert: whose it is, what is known of its training, and where its arrays are."""

    index: int
    name: str
    place: Path
    leaves: Leaves
    frames: int | None = None
    success_rate: float | None = None
    data: Any = None  # of its skill, as the original kept it

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays by flowrl's names, read now.

        Raises:
          ExpertCorruptError: they cannot be read.
        """
        stored = self.leaves.stored
        orbax = {leaf.path: leaf for leaf in stored.values() if isinstance(leaf, OrbaxLeaf)}
        forms = {path: (leaf.shape, leaf.dtype) for path, leaf in orbax.items()}
        read = checkpoints.load_leaves(self.place, forms) if forms else {}
        return {name: _read(leaf, read) for name, leaf in stored.items()}


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Something of the old folder that is not migrated, and why."""

    what: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What one form of the original holds; `words` is empty where the form is not there."""

    words: str = ""
    experts: tuple[OldExpert, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    activation: str = ""


def saved_tree(folder: Path) -> dict[str, Any]:
    """The tree in an Orbax folder, with `OrbaxLeaf`s in the place of arrays.

    Raises:
      ExpertCorruptError: it holds no readable description of its arrays.
    """
    root: dict[str, Any] = {}
    for path, (shape, dtype) in checkpoints.forms_of(folder).items():
        *parents, name = path.split("/")
        node = root
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise ExpertShapeError(f"{folder} has an array at {parent[:40]!r} and others below")
        node[name] = OrbaxLeaf(path, shape, dtype)
    return root


def _read(leaf: Leaf, orbax: Mapping[str, np.ndarray]) -> np.ndarray:
    if isinstance(leaf, OrbaxLeaf):
        return np.ascontiguousarray(orbax[leaf.path], dtype=np.float32)
    if isinstance(leaf, StoredArray):
        return numbers(leaf)
    raise ExpertShapeError(f"a {type(leaf).__name__} is no array")
