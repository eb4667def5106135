"""Compiling once: processes that need the same program at the same time wait for one of them.

JAX's persistent cache is shared by all runs, but two runs that start together would both miss it
and compile the same program side by side. Here the first one compiles and the others load.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import jax

from flowrl import locks
from flowrl.errors import BusyError

WAIT_SECONDS = 300.0


def compiled(traced: Any) -> Any:
    """The executable of `jax.jit(function).trace(…)`."""
    lowered = traced.lower()
    with _one_at_a_time(lowered):
        return lowered.compile()


@contextmanager
def _one_at_a_time(lowered: Any) -> Iterator[None]:
    """Hold the program's lock in the cache's folder; without a cache there is nothing to wait for.

    Who has waited too long compiles too: that is slow and never wrong.
    """
    folder = jax.config.values["jax_compilation_cache_dir"]
    with ExitStack() as stack:
        if folder:
            digest = hashlib.sha256(lowered.as_text().encode()).hexdigest()[:24]
            with suppress(BusyError):
                place = Path(folder, "locks", digest)
                stack.enter_context(locks.held(place, timeout_seconds=WAIT_SECONDS))
        yield
