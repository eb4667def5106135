"""Half-written files: how one becomes a whole one, and how it is told from a dead writer's.

Only `flowrl.durable` uses this.
"""

from __future__ import annotations

import _thread
import fcntl
import os
import secrets
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from flowrl.faults import die, fault_point, is_torn
from flowrl.flushing import flush

PART_SUFFIX = ".part"
_LARGE_BYTES = 2**18
PLAIN_NEW = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def replacing(path: Path, point: str, mode: int, *, lasting: bool = True) -> Iterator[int]:
    """A descriptor whose content takes the place of `path` once the block has ended well.

    It is durable then, unless it need not be `lasting`.
    """
    # Opened first: after the swap, a lack of descriptors must not keep it from being durable.
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        part, descriptor = _new_part(path, mode)
        try:
            yield descriptor
            if lasting:
                os.fsync(descriptor)
            fault_point(point)
            with _outliving(path):
                part.replace(path)
                if lasting:
                    os.fsync(folder)
        except BaseException:
            with suppress(OSError):  # what it was is on its way up
                part.unlink()
            raise
        finally:
            os.close(descriptor)
    finally:
        os.close(folder)


@contextmanager
def _outliving(path: Path) -> Iterator[None]:
    """Keep a large file that loses its name in the block: to free its blocks takes a millisecond.

    That is done behind the block, beside whatever follows, where a thread can be had.
    """
    old = None
    with suppress(OSError):  # there is none, or no descriptor for it
        if path.stat(follow_symlinks=False).st_size > _LARGE_BYTES:
            old = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        yield
    finally:
        if old is not None:
            _close_later(old)


def _close_later(descriptor: int) -> None:
    try:
        _thread.start_new_thread(os.close, (descriptor,))
    except RuntimeError:  # no further thread can be started
        os.close(descriptor)


@contextmanager
def replacing_in_order(paths: Sequence[Path], mode: int) -> Iterator[Replacing]:
    """As `replacing`, for several files that are flushed together and put in place one by one.

    Their folders are durable after the block. A file that the block has not put in place is
    removed, and the old one stays.
    """
    # Opened first, as in `replacing`.
    folders = {path.parent: -1 for path in paths}
    replacing = Replacing()
    try:
        for folder in folders:
            folders[folder] = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        for path in paths:
            replacing.begin(path, mode)
        yield replacing
        for descriptor in folders.values():
            os.fsync(descriptor)
    finally:
        replacing.end()
        for descriptor in folders.values():
            if descriptor >= 0:
                os.close(descriptor)


class Replacing:
    """Files that are to take the place of others: written, flushed together, put in place."""

    def __init__(self) -> None:
        self._parts: dict[Path, tuple[Path, int]] = {}

    def begin(self, path: Path, mode: int) -> None:
        """Have a file to write into, beside `path`."""
        self._parts[path] = _new_part(path, mode)

    def write(self, path: Path, payload: bytes) -> None:
        """Write what `path` is to hold."""
        write_all(self._parts[path][1], payload, f"write.{path.name}")

    def flush(self, others: Iterable[Path] = ()) -> None:
        """Make what is written durable, and `others` with it."""
        parts = (part for part, _ in self._parts.values())
        flush((*parts, *others), flags=os.O_NOFOLLOW)

    def put_in_place(self, path: Path) -> None:
        """Let what was written and flushed be `path` from now on."""
        fault_point(f"write.{path.name}")
        part, descriptor = self._parts.pop(path)
        try:
            part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)

    def end(self) -> None:
        """Remove what was not put in place."""
        for part, descriptor in self._parts.values():
            with suppress(OSError):
                part.unlink()
            os.close(descriptor)


@contextmanager
def replacing_all(paths: Sequence[Path], mode: int) -> Iterator[list[int]]:
    """As `replacing`, for several files: flushed together, put in place one after the other."""
    parts: list[tuple[Path, int]] = []
    try:
        parts += (_new_part(path, mode) for path in paths)
        yield [descriptor for _, descriptor in parts]
        flush([part for part, _ in parts], flags=os.O_NOFOLLOW)
        for path, (part, _) in zip(paths, parts, strict=True):
            fault_point(f"replace.{path.name}")
            part.replace(path)
    except BaseException:
        for part, _ in parts:
            with suppress(OSError):
                part.unlink()
        raise
    finally:
        for _, descriptor in parts:
            os.close(descriptor)
    flush(dict.fromkeys(path.parent for path in paths))


def write_all(descriptor: int, payload: bytes | memoryview, point: str) -> None:
    """Write all of it: a disk that is nearly full takes the beginning and says so."""
    torn = is_torn(point)
    rest = memoryview(payload)[: len(payload) // 2 if torn else None]
    while rest:
        rest = rest[os.write(descriptor, rest) :]
    if torn:
        die()


def remove_dead_part(part: Path) -> None:
    """Remove a half-written file, unless the process that writes it lives."""
    try:
        descriptor = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return  # finished meanwhile, or no file that flowrl wrote
    try:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            part.unlink(missing_ok=True)
    except BlockingIOError:
        pass  # its writer lives
    finally:
        os.close(descriptor)


def _new_part(path: Path, mode: int) -> tuple[Path, int]:
    """A file beside `path` that is this writer's own; its lock tells a sweep that he lives."""
    while True:
        part = path.with_name(f".{path.name}.{secrets.token_hex(4)}{PART_SUFFIX}")
        descriptor = os.open(part, PLAIN_NEW | os.O_EXCL, mode)
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_nlink:
                return part, descriptor
        os.close(descriptor)  # a sweep came between the two
