"""File locks that the kernel frees with their holder; a leaf, as filelock is slow to import."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import filelock

from flowrl.errors import BusyError, GraphDamagedError
from flowrl.storage import make_dir, naming


@contextmanager
def held(path: Path, *, timeout_seconds: float) -> Iterator[Callable[[], None]]:
    """Hold an exclusive flock on `path` for the length of the block.

    The file is made when missing and never deleted: a deleted lock file can have two holders. The
    block receives a check to call before it commits, which raises BusyError if another process
    deleted or replaced the file all the same. BusyError is raised, too, if no holder frees the lock
    in time, and GraphDamagedError if the path is not a plain file.
    """
    make_dir(path.parent)
    check_plain(path)
    # A soft lock, which filelock may fall back to, would outlive a killed holder.
    lock = filelock.FileLock(
        path, mode=0o600, timeout=timeout_seconds, thread_local=False, fallback_to_soft=False
    )
    try:
        with naming(path):
            lock.acquire()
    except filelock.Timeout as error:
        raise BusyError(
            f"{path} was held by {_holder(path)} for {timeout_seconds:g} s; try again later"
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
        with naming(path):
            lock.release()


def _holder(path: Path) -> str:
    """The process that took a lock, and its program, where the kernel names them."""
    with suppress(OSError):
        status = path.stat()
        place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
        for line in Path("/proc/locks").read_text(encoding="utf-8").splitlines():
            _, kind, _, _, pid, file, *_ = line.split()
            if (kind, file) == ("FLOCK", place):
                words = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
                program = " ".join(words[:3]).strip()  # a flag may hold a secret
                return f"process {pid} ({program!r:.120})"
    return "another process"


def is_held(path: Path) -> bool:
    """Return whether a process holds this lock, by sharing it for an instant; or OSError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    try:
        with naming(path):
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def check_plain(path: Path) -> None:
    """Raise GraphDamagedError unless a lock is a plain file or missing."""
    if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
        raise GraphDamagedError(
            f"{path} is not a plain file and cannot be a lock; make sure that no process uses "
            "the folder, then move it away: it is made again"
        )
