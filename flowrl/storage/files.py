"""Copying, moving and removing files and folders, so that a crash leaves the old or the new state.

Content is flushed before the rename that publishes it, and the parent folder after. A copy has
bytes of its own on the disk: a process that can still write to the source cannot change the copy.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from flowrl.errors import FileRefusedError
from flowrl.storage.atomic import (
    PLAIN_NEW,
    flush,
    flush_one,
    flush_tree,
    make_dir,
    remove_part_files,
    replacing,
    write_all,
)
from flowrl.storage.fault_injection import fault_point
from flowrl.storage.reading import CHUNK_BYTES, everything, open_plain, plain_files

TRASH_SUFFIX = ".trash"


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
