"""The child of `flowrl.arrays`: reads orders on stdin, says on stdout what the arrays are.

It imports nothing of flowrl, so that it starts fast and can be run by its path. Only leaves of the
wanted shapes are loaded, each after the last one is gone; chunks larger than their leaf, which
would take more memory than the leaf, are refused before.
"""

from __future__ import annotations

import hashlib
import json
import math
import resource
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore

_UNREADABLE = (ValueError, OSError, KeyError, TypeError, IndexError, MemoryError, RecursionError)
_METADATA_BYTES = 16 * 2**20
_CACHED = {"cache_pool": {"total_bytes_limit": 2**24}}
_FLOAT = "<f4"
_ARRAY = "/.zarray"


def main() -> int:
    """Answer each order, a line each, until there are no more; returns the exit code."""
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    for line in sys.stdin.buffer:
        order = json.loads(line)
        signal.alarm(order["seconds"])  # whoever asks may be gone by then
        resource.setrlimit(resource.RLIMIT_AS, (order["memory_bytes"], most))
        wanted = {leaf: tuple(shape) for leaf, shape in order["wanted"].items()}
        found = [answer(Path(folder), wanted) for folder in order["folders"]]
        signal.alarm(0)
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()
    return 0


def answer(folder: Path, wanted: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """The forms of all leaves in `folder`; their digest too when they are the wanted ones."""
    facts: dict[str, Any] = {"shapes": {}, "dtypes": {}, "content": "", "not_finite": []}
    try:
        context = tensorstore.Context(_CACHED)  # its own: other files may have lain here before
        store = _store(folder, context)
        forms = _forms(folder, store)
        facts["shapes"] = {leaf: form["shape"] for leaf, form in forms.items()}
        facts["dtypes"] = {leaf: form["dtype"] for leaf, form in forms.items()}
        shapes = {leaf: tuple(shape) for leaf, shape in facts["shapes"].items()}
        if shapes == wanted and set(facts["dtypes"].values()) <= {_FLOAT}:
            facts["content"], facts["not_finite"] = _digest(store, forms, context)
    except _UNREADABLE as error:
        reason = str(error).partition("\n")[0][:200]
        return {**facts, "unreadable": f"{type(error).__name__}: {reason}"}
    return {**facts, "unreadable": ""}


def _store(folder: Path, context: Any) -> Any:
    """The names and bytes below a checkpoint, as Orbax writes them."""
    files = {"driver": "file", "path": f"{folder}/"}
    spec = {"driver": "ocdbt", "base": files} if (folder / "manifest.ocdbt").exists() else files
    return tensorstore.KvStore.open(spec, context=context).result()


def _forms(folder: Path, store: Any) -> dict[str, Any]:
    """The description of every leaf by its path; what Orbax would restore, and nothing else."""
    names = [key.decode() for key in store.list().result()]
    reads = {name: store.read(name) for name in names if name.endswith(_ARRAY)}
    found = {
        name.removesuffix(_ARRAY).replace(".", "/"): json.loads(read.result().value)
        for name, read in reads.items()
    }
    described = _described(folder)
    if described != set(found):
        odd = sorted(described ^ set(found))
        raise ValueError(f"its description and its arrays differ in {', '.join(odd)[:150]}")
    for leaf, form in found.items():
        shape, chunks = form["shape"], form["chunks"]
        if form["zarr_format"] != 2 or len(shape) != len(chunks) or form.get("filters"):
            raise ValueError(f"{leaf} is stored in an unknown form")
        if math.prod(chunks) > max(1, math.prod(shape)):
            raise ValueError(f"{leaf} of shape {shape} is stored in chunks of {chunks}")
    return found


def _described(folder: Path) -> set[str]:
    """The leaves that Orbax's own description lists."""
    path = folder / "_METADATA"
    if path.stat().st_size > _METADATA_BYTES:
        raise ValueError(f"its description has {path.stat().st_size} bytes")
    tree = json.loads(path.read_bytes())["tree_metadata"]
    return {"/".join(str(key["key"]) for key in leaf["key_metadata"]) for leaf in tree.values()}


def _digest(store: Any, forms: Mapping[str, Any], context: Any) -> tuple[str, list[str]]:
    """The digest that `checkpoints.array_digest` makes, and the leaves that are not finite."""
    total = hashlib.sha256()
    not_finite: list[str] = []
    base = {**store.spec().to_json(), "path": store.path}
    opened = {leaf: _open(base, leaf, forms[leaf], context) for leaf in sorted(forms)}
    for leaf, opening in opened.items():
        array = np.ascontiguousarray(opening.result().read().result())
        total.update(f"{leaf}\0{array.dtype.str}\0{array.shape}\n".encode())
        total.update(array.data)
        if not np.isfinite(array).all():
            not_finite.append(leaf)
    return total.hexdigest(), not_finite


def _open(base: Mapping[str, Any], leaf: str, form: Mapping[str, Any], context: Any) -> Any:
    """A leaf in the very form that was looked at, which is not read a second time."""
    place = {**base, "path": f"{base['path']}{leaf.replace('/', '.')}/"}
    spec = {"driver": "zarr", "kvstore": place, "metadata": form}
    return tensorstore.open(spec, context=context, read=True, open=True, assume_metadata=True)


if __name__ == "__main__":
    sys.exit(main())
