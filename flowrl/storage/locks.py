"""File locks that the kernel frees with their holder; a leaf, as filelock is slow to import."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import filelock

from flowrl.errors import BusyError, FileRefusedError
from flowrl.storage import make_dir


@contextmanager
def held(path: Path, *, timeout_seconds: float) -> Iterator[Callable[[], None]]:
    """Hold an exclusive flock on `path` for the length of the block.

    The file is made when missing and never deleted: a deleted lock file can have two holders. The
    block receives a check to call before it commits: the check raises BusyError if another process
    deleted or replaced the file all the same.

    Raises:
      BusyError: no holder freed the lock in time.
      FileRefusedError: the path is not a plain file. Nothing else is translated.
    """
    make_dir(path.parent)
    check_plain(path)
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

    def check() -> None:
        with suppress(FileNotFoundError):
            if os.path.samestat(mine, path.lstat()):
                return
        raise BusyError(f"{path} was removed while it was held; do it again")

    try:
        mine = path.lstat()
        yield check
    finally:
        lock.release()


def open_plain_lock(path: Path) -> int:
    """Open a lock file for reading; returns a descriptor.

    Raises:
      FileRefusedError: the path is not a plain file.
      OSError: it cannot be opened; FileNotFoundError when it is missing.
    """
    check_plain(path)
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def check_plain(path: Path) -> None:
    """Make sure that a lock is a plain file or missing.

    Raises:
      FileRefusedError: it is a link, a folder, or another thing that cannot be a lock.
    """
    if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
        raise FileRefusedError(
            f"{path} is not a plain file and cannot be a lock; make sure that no process uses "
            "the folder, then move it away: it is made again"
        )
