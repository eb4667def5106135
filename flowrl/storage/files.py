"""Reading files without trust; copying, moving and removing files and folders.

Reading takes plain files only, of bounded size, never a link: other processes may have written
them. A crash during a change leaves the old state or the new one: content is flushed before the
rename that publishes it, and the parent folder after. A copy has bytes of its own on the disk: a
process that can still write to the source cannot change the copy.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from flowrl.errors import FileRefusedError
from flowrl.storage.atomic import (
    PLAIN_NEW,
    everything,
    fault_point,
    flush,
    flush_one,
    flush_tree,
    make_dir,
    remove_part_files,
    replacing,
    write_all,
)

TRASH_SUFFIX = ".trash"
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


def copy_file(source: Path, target: Path) -> None:
    """Copy one plain file of any size, atomically and durably."""
    point = f"copy.{target.name}"
    with replacing(target, point) as descriptor:
        _copy_content(source, descriptor, point)


def copy_trees(
    sources: Mapping[Path, Path], *, left_out: list[Path] | None = None, durable: bool = True
) -> dict[Path, str]:
    """Copy to each target, which must not exist, the plain files and folders of its source.

    If one copy fails, all are removed. A killed copy stays in pieces, so a target is a name that
    nobody reads until `move_dirs` publishes it.

    Args:
      sources: the source of each target.
      left_out: receives links and special files, which are not copied; None refuses them.
      durable: False if the caller flushes the copies.

    Returns:
      The `tree_digest` of each copy by its target.

    Raises:
      FileRefusedError: a source is no folder, or has a link or special file that is not left out.
    """
    digests: dict[Path, str] = {}
    begun: list[Path] = []
    try:
        for target, source in sources.items():
            files = list(plain_files(source, left_out=left_out))
            make_dir(target.parent, durable=durable)
            target.mkdir(mode=0o700)
            begun.append(target)
            digests[target] = _copy_below(files, source, target)
        if durable:
            flush(path for new in begun for path in everything(new))
    except BaseException:
        for target in begun:
            remove_unread_tree(target)  # a full disk needs the space
        raise
    return digests


def commit_dir(prepared: Path, final: Path) -> None:
    """Publish a finished folder under its final name, durably; `final` must not exist."""
    flush_tree(prepared)
    move_dir(prepared, final)


def move_dir(source: Path, target: Path) -> None:
    """Rename a folder within one file system and make both parents durable."""
    make_dir(target.parent)
    move_dirs({target: source})


def move_dirs(sources: Mapping[Path, Path], *, durable: bool = True) -> None:
    """Rename each source to its target, then make all their parents durable together.

    With `durable=False` the caller flushes the parents.

    Raises:
      FileRefusedError: a target exists.
    """
    for target, source in sources.items():
        if os.path.lexists(target):
            raise FileRefusedError(f"{target} exists already; move it away")
        source.rename(target)
    if durable:
        flush(dict.fromkeys(path.parent for pair in sources.items() for path in pair))


def remove_file(path: Path) -> None:
    """Remove a file or a link durably; a missing one is no error."""
    try:
        path.unlink()
    except FileNotFoundError:
        return
    flush_one(path.parent)


def remove_tree(path: Path) -> None:
    """Remove a folder: rename it to a `.trash` name first, then remove its content.

    A link is removed itself, never what it points to.
    """
    if not os.path.lexists(path):
        return
    trash = path if path.name.endswith(TRASH_SUFFIX) else _free_name(path)
    if trash != path:
        try:
            path.rename(trash)
        except FileNotFoundError:
            return  # another process removed it first
        flush_one(path.parent)
    fault_point("remove_tree.renamed")
    if trash.is_symlink() or not trash.is_dir():
        trash.unlink(missing_ok=True)
    while os.path.lexists(trash):
        with suppress(FileNotFoundError):  # another process removes it, too
            shutil.rmtree(trash)
    flush_one(trash.parent)


def remove_unread_tree(path: Path) -> None:
    """Remove a folder that nobody reads; `remove_leftovers` removes what an error leaves of it."""
    shutil.rmtree(path, ignore_errors=True)


def remove_leftovers(folder: Path) -> None:
    """Remove what a crash left half removed or half written directly below `folder`."""
    if not folder.is_dir():
        return
    for entry in list(folder.iterdir()):
        if entry.name.endswith(TRASH_SUFFIX) or entry.name.startswith(".tmp-"):
            remove_tree(entry)
    remove_part_files(folder)


def _copy_below(files: Iterable[Path], source: Path, target: Path) -> str:
    """Copy files below `source` to `target`, not durably; returns the copy's `tree_digest`."""
    total = hashlib.sha256()
    for file in files:
        inside = file.relative_to(source)
        make_dir((target / inside).parent, durable=False)
        descriptor = os.open(target / inside, PLAIN_NEW | os.O_EXCL, 0o600)
        try:
            content = _copy_content(file, descriptor, f"copy.{file.name}")
        finally:
            os.close(descriptor)
        total.update(f"{inside.as_posix()}\0{content}\n".encode())
    return total.hexdigest()


def _copy_content(source: Path, descriptor: int, point: str) -> str:
    """Copy one file's bytes; returns their sha256."""
    content = hashlib.sha256()
    with open_plain(source) as reader:
        while chunk := reader.read(CHUNK_BYTES):
            content.update(chunk)
            write_all(descriptor, chunk, point)
    fault_point(point)
    return content.hexdigest()


def _free_name(path: Path) -> Path:
    for number in range(1_000_000):
        trash = path.with_name(f"{path.name}.{number}{TRASH_SUFFIX}")
        if not os.path.lexists(trash):
            return trash
    raise FileRefusedError(f"{path.parent} is full of *.trash folders; remove them")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


def _entries(folder: Path | str) -> Iterator[os.DirEntry[str]]:
    """Yield all files below a folder, in the order of the parts of their paths."""
    with os.scandir(folder) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _entries(entry.path)
        else:
            yield entry
