"""File locks that the kernel frees when their holder dies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock

from flowrl import durable
from flowrl.errors import BusyError


@contextmanager
def held(path: Path, *, timeout_seconds: float) -> Iterator[Callable[[], None]]:
    """Hold an exclusive flock on `path` for the length of the block.

    The file is made when missing and never deleted: a deleted lock file can have two holders. The
    block is given a check to make before it commits: it raises BusyError when somebody deleted or
    replaced the file all the same.

    Raises:
      BusyError: nobody freed the lock in time. Nothing else is translated.
    """
    durable.make_dir(path.parent)
    # A soft lock, which filelock may fall back to, would outlive a killed holder.
    lock = filelock.FileLock(
        path, mode=0o600, timeout=timeout_seconds, thread_local=False, fallback_to_soft=False
    )
    try:
        lock.acquire()
    except filelock.Timeout as error:
        raise BusyError(
            f"{path} was held by another process for {timeout_seconds:g} s; try again later"
        ) from error
    try:
        mine = _identity(path)
        yield lambda: _refuse_another(path, mine)
    finally:
        lock.release()


def _refuse_another(path: Path, mine: tuple[int, int] | None) -> None:
    if mine is None or _identity(path) != mine:
        raise BusyError(f"{path} was removed while it was held; do it again")


def _identity(path: Path) -> tuple[int, int] | None:
    """Which file has this name, None when none has."""
    try:
        facts = path.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None
    return facts.st_dev, facts.st_ino
