"""File locks that the kernel frees when their holder dies."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock

from flowrl.errors import BusyError, FileRefusedError
from flowrl.storage import make_dir

_NOT_A_FILE = frozenset({errno.EISDIR, errno.ELOOP, errno.ENXIO})


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
    try:
        mine = _identity(path)
        yield lambda: _refuse_another(path, mine)
    finally:
        lock.release()


def open_plain_lock(path: Path) -> int:
    """Open a lock file for reading; never waits for the writer of a pipe. Returns a descriptor.

    Raises:
      FileRefusedError: the path is not a plain file.
      OSError: it cannot be opened; FileNotFoundError when it is missing.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in _NOT_A_FILE:
            raise
        raise _no_lock(path) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _no_lock(path)
    return descriptor


def check_plain(path: Path) -> None:
    """Make sure that a lock is a plain file or missing.

    Raises:
      FileRefusedError: it is a link, a folder, or another thing that cannot be a lock.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        raise _no_lock(path)


def _no_lock(path: Path) -> FileRefusedError:
    return FileRefusedError(
        f"{path} is not a plain file and cannot be a lock; make sure that no process uses "
        "the folder, then move it away: it is made again"
    )


def _refuse_another(path: Path, mine: tuple[int, int] | None) -> None:
    if mine is None or _identity(path) != mine:
        raise BusyError(f"{path} was removed while it was held; do it again")


def _identity(path: Path) -> tuple[int, int] | None:
    """Return device and inode of the file of this name, None when it is missing."""
    try:
        found = path.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino
