"""Reading files that other processes wrote: plain files only, of bounded size, never a link."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from flowrl.errors import FileRefusedError

READ_LIMIT_BYTES = 64 * 2**20
CHUNK_BYTES = 2**20
# These mean that the file itself is wrong. Others, such as a lack of descriptors, may pass.
_REFUSED = frozenset(
    getattr(errno, name)
    for name in ["EACCES", "EISDIR", "ELOOP", "ENAMETOOLONG", "ENOENT", "ENOTDIR", "ENXIO", "EPERM"]
)


def open_plain(path: Path) -> BinaryIO:
    """Open a plain file for reading; never waits for the writer of a pipe.

    Raises:
      FileRefusedError: the file is missing, a link, or not a plain file.
      OSError: it cannot be opened now, for instance for lack of descriptors.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        raise FileRefusedError(f"{path} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileRefusedError(f"{path} is not a plain file; remove it")
    return os.fdopen(descriptor, "rb")


def read_bytes(path: Path, *, limit_bytes: int = READ_LIMIT_BYTES) -> bytes:
    """Read a plain file.

    Raises:
      FileRefusedError: the file is missing, a link, not a plain file, or over the limit.
      OSError: it cannot be read now; the content on disk may be intact.
    """
    with open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        content = b"" if size > limit_bytes else file.read(limit_bytes + 1)
    if max(size, len(content)) > limit_bytes:
        raise FileRefusedError(f"{path} has {max(size, len(content))} bytes, over {limit_bytes}")
    return content


def read_json(path: Path, *, limit_bytes: int = READ_LIMIT_BYTES) -> dict[str, Any]:
    """Read the JSON object in a file.

    Raises:
      FileRefusedError: as `read_bytes`, or the content is not one JSON object; NaN and Infinity
        are not JSON.
    """
    content = read_bytes(path, limit_bytes=limit_bytes)
    try:
        document = json.loads(content, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise FileRefusedError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(document, dict):
        raise FileRefusedError(f"{path} holds {type(document).__name__}, not a JSON object")
    return document


def plain_files(root: Path, *, left_out: list[Path] | None = None) -> Iterator[Path]:
    """Yield every plain file below `root`, sorted.

    Links and special files are added to `left_out` if it is given, and refused otherwise.

    Raises:
      FileRefusedError: `root` is not a folder, or holds a link or a special file.
    """
    if root.is_symlink() or not root.is_dir():
        raise FileRefusedError(f"{root} is not a folder")
    for entry in _entries(root):
        if entry.is_file(follow_symlinks=False):
            yield Path(entry.path)
        elif left_out is not None:
            left_out.append(Path(entry.path))
        else:
            raise FileRefusedError(f"{entry.path} is a link or a special file; remove it")


def everything(root: Path) -> Iterator[Path]:
    """Yield every file and folder below `root`, then `root` itself."""
    for folder, _, names in os.walk(root, topdown=False, onerror=_fail):
        yield from (Path(folder, name) for name in names)
        yield Path(folder)


def tree_digest(root: Path) -> str:
    """Return the sha256 over the names and contents of all plain files below `root`, as hex."""
    total = hashlib.sha256()
    for path in plain_files(root):
        content = hashlib.sha256()
        with open_plain(path) as file:
            while chunk := file.read(CHUNK_BYTES):
                content.update(chunk)
        total.update(f"{path.relative_to(root).as_posix()}\0{content.hexdigest()}\n".encode())
    return total.hexdigest()


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


def _fail(error: OSError) -> NoReturn:
    """Stop a walk at a folder that cannot be listed; otherwise it would count as empty."""
    raise error


def _entries(folder: Path | str) -> Iterator[os.DirEntry[str]]:
    """Yield all files below a folder, in the order of the parts of their paths."""
    with os.scandir(folder) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _entries(entry.path)
        else:
            yield entry
