"""Arrays on disk, one Orbax checkpoint per expert; the only module that imports Orbax.

Orbax keeps a torn save from being read, but neither flushes it to disk nor refuses an array of
another shape when it restores NumPy arrays. This module does both: it flushes a folder before the
rename that publishes it, and compares every leaf with what the caller expects before loading.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from flax.traverse_util import unflatten_dict

from flowrl import storage
from flowrl.errors import ExpertCorruptError, ExpertMissingError, ExpertShapeError
from flowrl.runs import Shapes

PyTree = TypeVar("PyTree")
_NUMBER = re.compile(r"0|[1-9][0-9]*")
_UNREADABLE = (ValueError, OSError, KeyError, TypeError)  # what Orbax raises for damaged files


def save_expert(folder: Path, params: Any) -> None:
    """Save nested dicts of arrays of any shape and dtype to `folder`, a new one, durably.

    OSError means that the disk is full, which Orbax reports by a ValueError.
    """
    storage.make_dir(folder.parent)
    for left in folder.parent.glob(f".tmp-{folder.name}*"):  # Orbax's, of a trainer that was killed
        storage.remove_tree(left)
    try:
        with storage.building(folder.absolute()) as prepared, _checkpointer() as checkpointer:
            checkpointer.save(prepared, unflatten_dict(host_leaves(params), sep="/"))
    except ValueError as error:
        for number in (errno.ENOSPC, errno.EDQUOT):
            if (words := os.strerror(number)) in str(error):
                raise OSError(number, words, str(folder)) from error
        raise


def load_expert(folder: Path, like: PyTree) -> PyTree:
    """Read the tree in `folder`, bit for bit, as NumPy arrays in the structure of `like`.

    Each leaf of `like` needs only `shape` and `dtype`, for example `like_of(shapes)`.

    Raises:
      ExpertMissingError: there is no such folder.
      ExpertCorruptError: its files cannot be read.
      ExpertShapeError: a leaf is missing, unexpected, or has another shape or dtype.
    """
    if not folder.is_dir():
        raise ExpertMissingError(f"{folder} does not exist; train its skill again")
    leaves = named_leaves(like)
    expected = {path: _form(numbers(leaf)) for path, leaf in leaves.items()}
    _refuse_difference(folder, _stored_forms(folder), expected)
    blank = {path: np.zeros(shape, dtype) for path, (shape, dtype) in expected.items()}
    try:
        with _checkpointer() as checkpointer:
            stored = named_leaves(
                checkpointer.restore(folder.absolute(), unflatten_dict(blank, sep="/"))
            )
    except _UNREADABLE as error:
        raise _corrupt(folder, error) from error
    restored = [from_numbers(stored[path], leaf) for path, leaf in leaves.items()]
    return jax.tree.unflatten(jax.tree.structure(like), restored)


def shapes_of(params: Any) -> dict[str, tuple[int, ...]]:
    """Return the shape of every leaf of any shape by its path, as run files hold it."""
    return {path: tuple(leaf.shape) for path, leaf in named_leaves(params).items()}


def array_digest(params: Any) -> str:
    """Return the sha256 over path, dtype, shape and bytes of every leaf of any shape, as hex.

    Two saves of the same arrays differ in their files, by times and random names, but not in this.
    """
    total = hashlib.sha256()
    for path, leaf in sorted(host_leaves(params).items()):
        total.update(f"{path}\0{leaf.dtype.str}\0{leaf.shape}\n".encode())
        total.update(leaf.tobytes())
    return total.hexdigest()


def like_of(shapes: Shapes, dtype: Any = np.float32) -> dict[str, Any]:
    """Return a tree of abstract leaves of these shapes, as `load_expert` takes it.

    >>> like_of({"actor/dense_0/bias": (64,)})["actor"]["dense_0"]["bias"].shape
    (64,)
    """
    leaves = {path: jax.ShapeDtypeStruct(shape, dtype) for path, shape in shapes.items()}
    return unflatten_dict(leaves, sep="/")


def stored_like(folder: Path) -> dict[str, Any]:
    """Return a checkpoint's abstract leaves by path; ExpertCorruptError if it is unreadable."""
    forms = _stored_forms(folder).items()
    return {path: jax.ShapeDtypeStruct(shape, dtype) for path, (shape, dtype) in forms}


def save_resume(folder: Path, tree: Any) -> None:
    """Save a resumable state of any shapes, then remove the older ones below `folder`."""
    storage.remove_leftovers(folder)  # of a killed save
    older = _numbered(folder)
    save_expert(folder / str(older[-1] + 1 if older else 0), tree)
    for number in older:
        storage.remove_tree(folder / str(number))


def load_resume(folder: Path, like: PyTree) -> PyTree:
    """Read the newest resumable state below `folder`; raises as `load_expert` does."""
    numbers = _numbered(folder)
    if not numbers:
        raise ExpertMissingError(f"{folder} holds no resumable state; start with --no_resume")
    return load_expert(folder / str(numbers[-1]), like)


def has_resume(folder: Path) -> bool:
    """Return whether a stopped trainer left a state to continue from."""
    return bool(_numbered(folder))


def _checkpointer() -> Any:
    """Reads and writes by this process alone; others of the same run are not waited for."""
    import orbax.checkpoint as ocp  # late: a first update need not wait for it

    if jax.process_count() == 1:
        return ocp.StandardCheckpointer()
    own = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(primary_host=own, active_processes={own})
    return ocp.StandardCheckpointer(multiprocessing_options=alone)


def _numbered(folder: Path) -> list[int]:
    if not folder.is_dir():
        return []
    names = [entry.name for entry in folder.iterdir()]
    return sorted(int(name) for name in names if _NUMBER.fullmatch(name))


def holds_expert(folder: Path) -> bool:
    """Return whether a folder is one that `save_expert` wrote, whole or damaged."""
    return (folder / "_METADATA").exists()


def _stored_forms(folder: Path) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    try:
        with _checkpointer() as checkpointer:
            metadata = checkpointer.metadata(folder.absolute()).item_metadata
        if metadata is None:
            raise ValueError("it holds no description of its arrays")
        return {path: _form(leaf) for path, leaf in named_leaves(metadata.tree).items()}
    except (*_UNREADABLE, AttributeError) as error:
        raise _corrupt(folder, error) from error


def _refuse_difference(folder: Path, stored: dict[str, Any], expected: dict[str, Any]) -> None:
    for path in sorted({*stored, *expected}):
        actual, needed = stored.get(path), expected.get(path)
        if actual == needed:
            continue
        has = f"has {path} of shape {_described(actual)}" if actual else f"has no {path}"
        needs = f"this run needs {_described(needed)}" if needed else "this run has no such leaf"
        remedy = ", or set --layer_size and --env_name as they were" if actual and needed else ""
        raise ExpertShapeError(f"{folder} {has}, {needs}; train its skill again{remedy}")


def _described(form: tuple[tuple[int, ...], np.dtype]) -> str:
    shape, dtype = form
    return str(shape) if dtype == np.float32 else f"{shape} {dtype}"


def _form(leaf: Any) -> tuple[tuple[int, ...], np.dtype]:
    return tuple(leaf.shape), np.dtype(leaf.dtype)


def _corrupt(folder: Path, error: Exception) -> ExpertCorruptError:
    reason = str(error).partition("\n")[0][:200]
    return ExpertCorruptError(f"{folder} cannot be read ({reason}); roll back or train again")


def named_leaves(tree: Any) -> dict[str, Any]:
    """Return the leaves of a tree by their paths."""
    pairs, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in pairs}


def host_leaves(tree: Any) -> dict[str, np.ndarray]:
    """Return the leaves of a tree by their paths, in the host's memory, as numbers."""
    on_host = jax.device_get(jax.tree.map(numbers, tree))
    return {path: np.asarray(leaf) for path, leaf in named_leaves(on_host).items()}


def numbers(leaf: Any) -> Any:
    """Return the numbers of a random key, any other leaf as it is."""
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def from_numbers(numbers: Any, like: Any) -> Any:
    """Return a random key of these numbers if `like` is one, else what was found."""
    return jax.random.wrap_key_data(numbers) if _is_key(like) else numbers


def _is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
