"""File locks that the kernel frees when their holder dies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock

from flowrl import durable
from flowrl.errors import BusyError


@contextmanager
def held(path: Path, *, timeout_seconds: float) -> Iterator[None]:
    """Hold an exclusive flock on `path` for the length of the block.

    The file is made when missing and never deleted: a deleted lock file can have two holders.

    Raises:
      BusyError: nobody freed the lock in time. Nothing else is translated.
    """
    durable.make_dir(path.parent)
    # A soft lock, which filelock may fall back to, would outlive a killed holder.
    lock = filelock.FileLock(
        path, timeout=timeout_seconds, thread_local=False, fallback_to_soft=False
    )
    try:
        lock.acquire()
    except filelock.Timeout as error:
        raise BusyError(
            f"{path} was held by another process for {timeout_seconds:g} s; try again later"
        ) from error
    try:
        yield
    finally:
        lock.release()
