"""Compiling once: processes that need the same program at the same time wait for one of them.

JAX's persistent cache is shared by all runs, but two runs that start together would both miss it
and compile the same program side by side. Here the first one compiles and the others load.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import jax

from flowrl.errors import BusyError
from flowrl.storage import locks

_WAIT_SECONDS = 300.0


def compiled(traced: Any, options: dict[str, Any] | None = None) -> Any:
    """The executable of `jax.jit(function).trace(…)`, with XLA's `options` where there are any."""
    lowered = traced.lower()
    folder = jax.config.values["jax_compilation_cache_dir"]
    if not folder:
        return lowered.compile(options)  # nothing is kept, so there is nobody to wait for
    digest = hashlib.sha256(lowered.as_text().encode()).hexdigest()[:24]
    with one_at_a_time(Path(folder), digest):
        return lowered.compile(options)


@contextmanager
def one_at_a_time(
    folder: Path, name: str, *, before_waiting: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Hold a program's lock, which lies in `locks/` of the folder where it is kept.

    `before_waiting` is called if another process holds it. Who has waited too long compiles too:
    that is slow and never wrong.
    """
    place = folder / "locks" / name
    with ExitStack() as stack:
        try:
            stack.enter_context(locks.held(place, timeout_seconds=0.0))
        except BusyError:
            before_waiting()
            with suppress(BusyError):
                stack.enter_context(locks.held(place, timeout_seconds=_WAIT_SECONDS))
        yield
