"""A digest of all code that compiled programs are made from."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import sys
from importlib.metadata import version
from pathlib import Path

_OURS = ("compiling", "envs", "networks", "ppo", "skills", "evaluate.py")
_LIBRARIES = ("jax", "jaxlib", "numpy", "optax", "craftax")
_READ = "craftax"  # small, and people change it in place


@functools.cache
def digest_of_sources() -> str:
    """sha256 over our own modules, the versions of the libraries, Craftax's code and XLA_FLAGS."""
    total = hashlib.sha256(sys.version.encode())
    for library in _LIBRARIES:
        total.update(f"{library} {version(library)}\n".encode())
    total.update(os.environ.get("XLA_FLAGS", "").encode())
    package = Path(__file__).parents[1]
    for place in [*(package / name for name in _OURS), *_craftax()]:
        for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            total.update(f"{path.relative_to(place.parent)} {content}\n".encode())
    return total.hexdigest()


def _craftax() -> list[Path]:
    spec = importlib.util.find_spec(_READ)
    return [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
