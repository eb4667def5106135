"""The one place that writes: files and folders appear whole or not at all.

Every function leaves the disk in its old or its new state, whatever instant the process or the
machine dies at: data is flushed before the rename that publishes it, and the parent folder after.
What cannot be flushed is given up, never flushed again: the kernel may have dropped it meanwhile.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from flowrl.copying import copy_below, copy_content
from flowrl.errors import FileRefusedError
from flowrl.faults import fault_point
from flowrl.flushing import everything, flush, fsync_dir
from flowrl.parts import (
    PLAIN_NEW,
    replacing,
    replacing_all,
    replacing_in_order,
    write_all,
)
from flowrl.reading import (
    READ_LIMIT_BYTES,
    plain_files,
    read_bytes,
    read_json,
    tree_digest,
)
from flowrl.removing import remove_file, remove_tree, sweep, sweep_parts

__all__ = [
    "READ_LIMIT_BYTES",
    "append_line",
    "commit_dir",
    "copy_file",
    "copy_files",
    "copy_tree",
    "copy_tree_without_links",
    "copy_trees",
    "cut",
    "discard_tree",
    "everything",
    "fault_point",
    "flush",
    "fsync_dir",
    "fsync_tree",
    "make_dir",
    "make_file",
    "make_pipe",
    "move_dir",
    "move_dirs",
    "plain_files",
    "read_bytes",
    "read_json",
    "remove_file",
    "remove_pipe",
    "remove_tree",
    "replacing_in_order",
    "sweep",
    "sweep_parts",
    "tree_digest",
    "write_atomic",
    "write_json",
]


def make_dir(path: Path, *, lasting: bool = True) -> Path:
    """Make `path` and its missing parents, readable by their owner alone.

    Their names are durable then, unless they need not be `lasting`: the caller flushes them.
    """
    if path.is_dir():
        return path
    make_dir(path.parent, lasting=lasting)
    with suppress(FileExistsError):  # another process may be making it, too
        path.mkdir(mode=0o700)
    if not path.is_dir():
        raise NotADirectoryError(20, "Not a directory", str(path))
    if lasting:
        fsync_dir(path.parent)
    return path


def make_file(path: Path) -> None:
    """Make an empty file, readable by its owner alone; one that is there stays as it is."""
    os.close(os.open(path, PLAIN_NEW, 0o600))


def make_pipe(path: Path) -> None:
    """Make a named pipe, for its owner alone, in the place of what is there."""
    path.unlink(missing_ok=True)
    os.mkfifo(path, 0o600)


def remove_pipe(path: Path) -> None:
    """Remove a named pipe and let go who waits for it to be read; what is none stays."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def fsync_tree(root: Path) -> None:
    """Make every file and folder below `root`, and `root` itself, durable."""
    flush(everything(root), flags=os.O_NOFOLLOW)


def write_atomic(
    path: Path, content: str | bytes | memoryview, *, mode: int = 0o600, lasting: bool = True
) -> None:
    """Replace `path` by `content`: readers see the old file or the new one, never half.

    Of several writers at once the last one wins, wholly. What need not be `lasting` may be gone or
    damaged after a power cut: for files that the caller flushes, or that are made again then.
    """
    payload = content.encode() if isinstance(content, str) else content
    point = f"write.{path.name}"
    with replacing(path, point, mode, lasting=lasting) as descriptor:
        write_all(descriptor, payload, point)


def write_json(path: Path, document: Any, *, indent: int | None = 2, lasting: bool = True) -> None:
    """Write `document` as JSON, as `write_atomic` does."""
    write_atomic(path, json_text(document, indent=indent), lasting=lasting)


def json_text(document: Any, *, indent: int | None = 2) -> str:
    """What `write_json` writes; NaN is refused because jq cannot read it."""
    return json.dumps(document, indent=indent, allow_nan=False) + "\n"


def append_line(path: Path, line: str) -> None:
    """Add one line to a story file; a line is one write, so two writers do not mix.

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


def cut(path: Path, size: int) -> None:
    """Shorten a file to its first `size` bytes, at one stroke; a shorter one stays as it is."""
    descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW)
    try:
        if os.fstat(descriptor).st_size > size:
            os.ftruncate(descriptor, size)
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def copy_tree(source: Path, target: Path) -> str:
    """Copy plain files and folders to `target`, which must not exist, and make them durable.

    A copy that fails is removed; one that is killed stays in pieces, so `target` is a name that
    nobody reads until `move_dir` publishes it.

    Returns:
      What `tree_digest` says of the copy.

    Raises:
      FileRefusedError: something below `source` is a link or a special file.
    """
    return copy_trees({target: source})[target]


def copy_trees(
    sources: Mapping[Path, Path], *, left_out: list[Path] | None = None, lasting: bool = True
) -> dict[Path, str]:
    """Copy to each target its source, as `copy_tree` does, and make all durable together.

    If one fails, all that were begun are removed. Links and special files are added to `left_out`,
    if it is given, and not copied. Copies that need not be `lasting` yet are flushed by the caller.
    Returns the digest of each copy by its target.
    """
    digests: dict[Path, str] = {}
    begun: list[Path] = []
    try:
        for target, source in sources.items():
            files = list(plain_files(source, left_out=left_out))
            make_dir(target.parent, lasting=lasting)
            target.mkdir(mode=0o700)
            begun.append(target)
            digests[target] = copy_below(files, source, target)
        if lasting:
            flush((path for new in begun for path in everything(new)), flags=os.O_NOFOLLOW)
    except BaseException:
        for target in begun:
            shutil.rmtree(target, ignore_errors=True)  # a full disk needs the room
        raise
    return digests


def copy_tree_without_links(source: Path, target: Path) -> tuple[Path, ...]:
    """Copy as `copy_tree` does, but leave out links and special files; answers which.

    Raises:
      FileRefusedError: `source` is not a folder.
    """
    left_out: list[Path] = []
    copy_trees({target: source}, left_out=left_out)
    return tuple(left_out)


def copy_file(source: Path, target: Path) -> None:
    """Copy one plain file of any size, atomically and durably."""
    point = f"copy.{target.name}"
    with replacing(target, point, 0o600) as descriptor:
        copy_content(source, descriptor, point)


def copy_files(pairs: Mapping[Path, Path]) -> None:
    """Copy plain files, source to target, each atomically; all are durable at the end.

    They are flushed together, which is as fast as one, and then put in place in this order.
    """
    with replacing_all(list(pairs.values()), 0o600) as descriptors:
        for (source, target), descriptor in zip(pairs.items(), descriptors, strict=True):
            copy_content(source, descriptor, f"copy.{target.name}")


def discard_tree(path: Path) -> None:
    """Remove a folder that nobody reads; what a crash or an error leaves of it is swept later."""
    shutil.rmtree(path, ignore_errors=True)


def commit_dir(prepared: Path, final: Path) -> None:
    """Publish a finished folder under its final name, durably; `final` must not exist."""
    fsync_tree(prepared)
    move_dir(prepared, final)


def move_dir(source: Path, target: Path) -> None:
    """Rename a folder within one file system and make both parents durable."""
    make_dir(target.parent)
    move_dirs({target: source})


def move_dirs(sources: Mapping[Path, Path], *, lasting: bool = True) -> None:
    """Give each folder its target as a new name, then make all their parents durable together.

    Names that need not be `lasting` yet are flushed by the caller.
    """
    for target, source in sources.items():
        if os.path.lexists(target):
            raise FileRefusedError(f"{target} exists already; move it away")
        source.rename(target)
    if lasting:
        flush(dict.fromkeys(path.parent for pair in sources.items() for path in pair))
