"""Writing one file so that readers see the old content or the new one, never half of either.

The content goes into a `.part` file, is flushed, and is renamed over the old file; the folder is
flushed after. A `.part` file is locked by its writer, so a `.part` of a dead process can be told
apart and removed. A file that cannot be flushed is given up, never flushed again: the kernel may
have dropped its content meanwhile.

At the fault points a test kills the process or fails the disk: `FLOWRL_FAULT=<name>:<mode>` names
one of them. `kill` ends the process there, `raise` is an I/O error, `enospc` a full disk, and
`torn` writes half of the data before the process is killed.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import signal
import stat
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from flowrl.errors import ConfigError

PART_SUFFIX = ".part"
PLAIN_NEW = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
FLUSHERS = 4  # threads that flush at once; the journal commits all their files together
_NO_DESCRIPTOR = frozenset({errno.EMFILE, errno.ENFILE})
VARIABLE = "FLOWRL_FAULT"
_ERRORS = {
    "raise": (errno.EIO, "Input/output error (injected)"),
    "enospc": (errno.ENOSPC, "No space left on device (injected)"),
}
_MODES = ("kill", *_ERRORS, "torn")


def fault_point(name: str) -> None:
    """Die or fail here when the environment says so.

    Raises:
      ConfigError: the variable is not `<name>:<mode>`, or `torn` names a point without a write.
    """
    mode = _mode_at(name)
    if mode == "kill":
        _die()
    if mode == "torn":
        raise ConfigError(f"{VARIABLE}={name}:torn: nothing is written there; use kill")
    if mode:
        number, words = _ERRORS[mode]
        raise OSError(number, words, name)


def _is_torn(name: str) -> bool:
    """Return whether the write at this point shall stop half way, followed by `_die`."""
    return _mode_at(name) == "torn"


def _die() -> None:
    """End this process as kill -9 does."""
    os.kill(os.getpid(), signal.SIGKILL)


def write_atomic(
    path: Path, content: str | bytes | memoryview, *, mode: int = 0o600, durable: bool = True
) -> None:
    """Replace `path` by `content`: readers see the old file or the new one, never half.

    Of several writers at once the last one wins. With `durable=False` the file may be lost or
    damaged after a power cut: for files that the caller flushes, or that can be made again.
    """
    payload = content.encode() if isinstance(content, str) else content
    point = f"write.{path.name}"
    with replacing(path, point, mode=mode, durable=durable) as descriptor:
        write_all(descriptor, payload, point)


def write_json(path: Path, document: Any, *, indent: int | None = 2, durable: bool = True) -> None:
    """Write `document` as JSON, as `write_atomic` does; NaN is refused because jq refuses it."""
    text = json.dumps(document, indent=indent, allow_nan=False)
    write_atomic(path, text + "\n", durable=durable)


def append_line(path: Path, line: str) -> None:
    """Add one line to a log; a line is one write, so the lines of two writers do not mix.

    A line that a full disk or a kill tore stays torn, and the next one begins below it.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    try:
        size = os.fstat(descriptor).st_size
        torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        text = "\n" * torn + line.rstrip("\n") + "\n"
        write_all(descriptor, text.encode(), f"append.{path.name}")
    finally:
        os.close(descriptor)


def truncate(path: Path, size: int) -> None:
    """Shorten a file to its first `size` bytes, durably; a shorter file stays as it is."""
    descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW)
    try:
        if os.fstat(descriptor).st_size > size:
            os.ftruncate(descriptor, size)
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_dir(path: Path, *, durable: bool = True) -> Path:
    """Make `path` and its missing parents, readable by their owner alone.

    With `durable=False` the caller flushes their names.
    """
    if path.is_dir():
        return path
    make_dir(path.parent, durable=durable)
    with suppress(FileExistsError):  # another process may be making it, too
        path.mkdir(mode=0o700)
    if not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "Not a directory", str(path))
    if durable:
        flush_one(path.parent)
    return path


def make_file(path: Path) -> None:
    """Make an empty file, readable by its owner alone; an existing file stays as it is."""
    os.close(os.open(path, PLAIN_NEW, 0o600))


@contextmanager
def replacing(path: Path, point: str, *, mode: int = 0o600, durable: bool = True) -> Iterator[int]:
    """Yield a descriptor; after the block, what was written to it replaces `path`.

    If the block fails, the old file stays. `point` is the fault point before the rename.
    """
    # Opened first: after the rename, a lack of descriptors must not keep it from being durable.
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        part, descriptor = _new_part(path, mode)
        try:
            yield descriptor
            if durable:
                os.fsync(descriptor)
            fault_point(point)
            part.replace(path)
            if durable:
                os.fsync(folder)
        except BaseException:
            with suppress(OSError):  # the error that led here is on its way up
                part.unlink()
            raise
        finally:
            os.close(descriptor)
    finally:
        os.close(folder)


def remove_part_files(folder: Path) -> None:
    """Remove the `.part` files that dead writers left directly below `folder`."""
    if not folder.is_dir():
        return
    for entry in list(folder.iterdir()):
        if entry.name.startswith(".") and entry.name.endswith(PART_SUFFIX):
            _remove_dead_part(entry)


def flush(paths: Iterable[Path]) -> None:
    """Make files, and the names in folders, durable in any order, four at a time.

    One descriptor and no thread are enough; more of both are used if they can be had.

    Raises:
      OSError: one of them could not be flushed; it is not flushed again.
    """
    waiting = deque(paths)
    failed: list[OSError] = []
    threads: list[threading.Thread] = []
    with suppress(RuntimeError):  # the system gives no further thread
        for _ in range(min(len(waiting), FLUSHERS) - 1):
            thread = threading.Thread(target=_flush_some, args=(waiting, failed))
            thread.start()
            threads.append(thread)
    _flush_some(waiting, failed)
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    for path in waiting:  # left by threads that got no descriptor
        flush_one(path)


def flush_one(path: Path) -> None:
    """Make one file, or the names in one folder, durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_tree(root: Path) -> None:
    """Make every file and folder below `root`, and `root` itself, durable."""
    flush(everything(root))


def everything(root: Path) -> Iterator[Path]:
    """Yield every file and folder below `root`, then `root` itself."""
    for folder, _, names in os.walk(root, topdown=False, onerror=_fail):
        yield from (Path(folder, name) for name in names)
        yield Path(folder)


def write_all(descriptor: int, payload: bytes | memoryview, point: str) -> None:
    """Write the whole payload; a nearly full disk takes only the beginning of one write."""
    torn = _is_torn(point)
    rest = memoryview(payload)[: len(payload) // 2 if torn else None]
    while rest:
        rest = rest[os.write(descriptor, rest) :]
    if torn:
        _die()


def _flush_some(waiting: deque[Path], failed: list[OSError]) -> None:
    """Flush until nothing waits, a flush failed, or no descriptor can be had."""
    while not failed:
        try:
            path = waiting.popleft()
        except IndexError:
            return
        try:
            flush_one(path)
        except OSError as error:
            if error.errno in _NO_DESCRIPTOR:
                waiting.append(path)
                return
            failed.append(error)


def _new_part(path: Path, mode: int) -> tuple[Path, int]:
    """Make a `.part` file beside `path`; its lock says that its writer lives."""
    while True:
        part = path.with_name(f".{path.name}.{secrets.token_hex(4)}{PART_SUFFIX}")
        descriptor = os.open(part, PLAIN_NEW | os.O_EXCL, mode)
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_nlink:
                return part, descriptor
        os.close(descriptor)  # `remove_part_files` came between the two calls


def _remove_dead_part(part: Path) -> None:
    """Remove a `.part` file unless its writer lives."""
    try:
        descriptor = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return  # published meanwhile, or not a file of flowrl
    try:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            part.unlink(missing_ok=True)
    except BlockingIOError:
        pass  # its writer lives
    finally:
        os.close(descriptor)


def _mode_at(name: str) -> str:
    """Return the mode for this point; empty when the variable names another one."""
    value = os.environ.get(VARIABLE)
    if not value:
        return ""
    point, _, mode = value.rpartition(":")
    if not point or mode not in _MODES:
        raise ConfigError(f"{VARIABLE}={value!r} is not <name>:<mode>; use {', '.join(_MODES)}")
    return mode if point == name else ""


def _fail(error: OSError) -> NoReturn:
    """Stop a walk at a folder that cannot be listed; otherwise it would count as empty."""
    raise error
