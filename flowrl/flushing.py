"""Making much durable at once: a journal takes all who wait together in one commit.

Flushed one after another, fifteen files of a few bytes wait for fifteen commits of the file
system's journal; flushed side by side, they wait for two or three. Only `flowrl.durable` uses this.
"""

from __future__ import annotations

import _thread
import errno
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from flowrl.reading import fail

FLUSHERS = 4  # at once; more gain nothing
_NO_DESCRIPTOR = frozenset({errno.EMFILE, errno.ENFILE})


def flush(paths: Iterable[Path], *, flags: int = 0) -> None:
    """Make files, and the names in folders, durable in any order; each is opened with `flags`.

    It needs no more than one descriptor and no thread, and takes more of both where it can.

    Raises:
      OSError: one of them could not be flushed; it is not tried again.
    """
    waiting = deque(paths)
    failed: list[OSError] = []
    flush_some = partial(_flush_some, waiting, failed, flags)
    ended = threading.Semaphore(0)
    helpers = _started(flush_some, ended, min(len(waiting), FLUSHERS) - 1)
    try:
        flush_some()
    except BaseException:
        waiting.clear()  # somebody wants this process to stop
        raise
    finally:
        for _ in range(helpers):
            ended.acquire()
    if failed:
        raise failed[0]
    for path in waiting:  # left over by those who got no descriptor
        flush_one(path, flags)


def flush_one(path: Path, flags: int = 0) -> None:
    """Make one file or folder durable, opened with `flags`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_dir(path: Path) -> None:
    """Make the names in a folder durable."""
    flush_one(path, os.O_DIRECTORY)


def everything(root: Path) -> Iterator[Path]:
    """Every file and folder below `root`, and `root` itself."""
    for folder, _, names in os.walk(root, topdown=False, onerror=fail):
        yield from (Path(folder, name) for name in names)
        yield Path(folder)


def _started(work: Callable[[], None], ended: threading.Semaphore, number: int) -> int:
    """Have threads do the work, too, and say that they have ended; answers how many there are.

    There are as many as the system lets us have. `threading.Thread` would wait for each to begin,
    which together takes longer than to flush.
    """

    def help_out() -> None:
        try:
            work()
        finally:
            ended.release()

    for started in range(number):
        try:
            _thread.start_new_thread(help_out, ())
        except RuntimeError:  # no further thread can be started
            return started
    return max(0, number)


def _flush_some(waiting: deque[Path], failed: list[OSError], flags: int) -> None:
    """Flush until nothing waits or something has failed."""
    while not failed:
        try:
            path = waiting.popleft()
        except IndexError:
            return
        try:
            flush_one(path, flags)
        except OSError as error:
            if error.errno in _NO_DESCRIPTOR:
                waiting.append(path)
                return
            failed.append(error)
