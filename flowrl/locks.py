"""File locks that the kernel frees when their holder dies."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock

from flowrl import durable
from flowrl.errors import BusyError, FileRefusedError

_ODD = frozenset({errno.EISDIR, errno.ELOOP, errno.ENXIO})  # not a file that can be opened


@contextmanager
def held(path: Path, *, timeout_seconds: float) -> Iterator[Callable[[], None]]:
    """Hold an exclusive flock on `path` for the length of the block.

    The file is made when missing and never deleted: a deleted lock file can have two holders. The
    block is given a check to make before it commits: it raises BusyError when somebody deleted or
    replaced the file all the same.

    Raises:
      BusyError: nobody freed the lock in time.
      FileRefusedError: what is there is no plain file. Nothing else is translated.
    """
    durable.make_dir(path.parent)
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
    """A descriptor of a lock file, to be read only; waits for no writer of a pipe.

    Raises:
      FileRefusedError: what is there is no plain file.
      OSError: it cannot be opened; FileNotFoundError when it is missing.
    """
    check_plain(path)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in _ODD:
            raise
        raise _no_lock(path) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _no_lock(path)
    return descriptor


def check_plain(path: Path) -> None:
    """Make sure that a lock is a plain file, or is not there yet.

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
        f"{path} is no plain file and cannot be a lock; make sure that nothing is at work in "
        "the folder, then move it away: it is made again"
    )


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
