"""The child program of `array_check`: reads one order on stdin, prints what the arrays are.

It imports nothing of flowrl, so it starts fast and can be run by its path. Only leaves of the
expected shapes are loaded, one at a time; chunks larger than their leaf are refused first.
"""

from __future__ import annotations

import hashlib
import json
import math
import resource
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore

_UNREADABLE = (ValueError, OSError, KeyError, TypeError, IndexError, RecursionError)
_CACHED = {"cache_pool": {"total_bytes_limit": 2**24}}
_FLOAT = "<f4"
_ARRAY = "/.zarray"


def main() -> int:
    """Answer the order; returns the exit code. Input that ends without an order is none."""
    text = sys.stdin.buffer.read()
    if not text:
        return 0
    order = json.loads(text)
    signal.alarm(order["seconds"])  # the process that asked may be gone by then
    wanted, (_, most) = order["memory_bytes"], resource.getrlimit(resource.RLIMIT_AS)
    bound = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
    resource.setrlimit(resource.RLIMIT_AS, (bound, most))
    expected = {leaf: tuple(shape) for leaf, shape in order["expected"].items()}
    sys.stdout.write("ready\n")  # a failure before this line is not of the files
    sys.stdout.flush()
    sys.stdout.write(json.dumps([report(Path(folder), expected) for folder in order["folders"]]))
    return 0


def report(folder: Path, expected: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Return the digest of the arrays in `folder`, or how they differ from what is expected."""
    content = ""
    try:
        context = tensorstore.Context(_CACHED)
        store = _store(folder, context)
        forms = _forms(folder, store)
        differences = list(_form_differences(forms, expected))
        if not differences:
            content, not_finite = _digest(store, forms, context)
            differences = [(leaf, "finite", "NaN or infinite") for leaf in not_finite]
    except _UNREADABLE as error:
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
        return {"content": "", "differences": [], "unreadable": reason}
    return {"content": content, "differences": differences, "unreadable": ""}


def _form_differences(
    forms: Mapping[str, Any], expected: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, str, str]]:
    """Each difference as the leaf, what is expected of it, and what was found."""
    shapes = {leaf: tuple(form["shape"]) for leaf, form in forms.items()}
    for leaf in sorted({*expected, *forms}):
        wanted, actual = expected.get(leaf, "absent"), shapes.get(leaf, "absent")
        if wanted != actual:
            yield leaf, str(wanted), str(actual)
        elif forms[leaf]["dtype"] != _FLOAT:
            yield f"{leaf} of dtype", _FLOAT, str(forms[leaf]["dtype"])


def _store(folder: Path, context: Any) -> Any:
    """The names and bytes below a checkpoint, as Orbax writes them."""
    files = {"driver": "file", "path": f"{folder}/"}
    spec = {"driver": "ocdbt", "base": files} if (folder / "manifest.ocdbt").exists() else files
    return tensorstore.KvStore.open(spec, context=context).result()


def _forms(folder: Path, store: Any) -> dict[str, Any]:
    """The description of every leaf by its path: what Orbax would restore, and nothing else."""
    names = [key.decode() for key in store.list().result()]
    reads = {name: store.read(name) for name in names if name.endswith(_ARRAY)}
    forms = {
        name.removesuffix(_ARRAY).replace(".", "/"): json.loads(read.result().value)
        for name, read in reads.items()
    }
    tree = json.loads((folder / "_METADATA").read_bytes())["tree_metadata"].values()
    described = {"/".join(str(key["key"]) for key in leaf["key_metadata"]) for leaf in tree}
    if described != set(forms):
        odd = sorted(described ^ set(forms))
        raise ValueError(f"its description and its arrays differ in {', '.join(odd)[:150]}")
    for leaf, form in forms.items():
        shape, chunks = form["shape"], form["chunks"]
        if form["zarr_format"] != 2 or len(shape) != len(chunks) or form.get("filters"):
            raise ValueError(f"{leaf} is stored in an unknown form")
        if math.prod(chunks) > max(1, math.prod(shape)):
            raise ValueError(f"{leaf} of shape {shape} is stored in chunks of {chunks}")
    return forms


def _digest(store: Any, forms: Mapping[str, Any], context: Any) -> tuple[str, list[str]]:
    """The digest that `checkpoint.array_digest` computes, and the leaves that are not finite."""
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
    """A leaf in the form that was checked, which is not read a second time."""
    place = {**base, "path": f"{base['path']}{leaf.replace('/', '.')}/"}
    spec = {"driver": "zarr", "kvstore": place, "metadata": form}
    return tensorstore.open(spec, context=context, read=True, open=True, assume_metadata=True)


if __name__ == "__main__":
    sys.exit(main())
