"""The one place that writes: files and folders appear whole or not at all.

Every function leaves the disk in its old or its new state, whatever instant the process or the
machine dies at: data is flushed before the rename that publishes it, and the parent folder after.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flowrl.errors import FileRefusedError

PART_SUFFIX = ".part"
TRASH_SUFFIX = ".trash"
READ_LIMIT_BYTES = 64 * 2**20
_CHUNK_BYTES = 2**20


def fault_point(name: str) -> None:
    """Die or fail here when `FLOWRL_FAULT` names this point as `<name>:<kill|raise|enospc>`."""
    wanted = os.environ.get("FLOWRL_FAULT")
    if wanted is None or wanted.rpartition(":")[0] != name:
        return
    match wanted.rpartition(":")[2]:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "enospc":
            raise OSError(28, "No space left on device (injected)", name)
        case _:
            raise OSError(5, "Input/output error (injected)", name)


def make_dir(path: Path) -> Path:
    """Make `path` and its parents, readable by their owner alone."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


def fsync_dir(path: Path) -> None:
    """Make the names in a folder durable."""
    _fsync(path, os.O_RDONLY | os.O_DIRECTORY)


def fsync_tree(root: Path) -> None:
    """Make every file and folder below `root`, and `root` itself, durable."""
    for folder, _, names in os.walk(root, topdown=False):
        for name in names:
            _fsync(Path(folder, name), os.O_RDONLY | os.O_NOFOLLOW)
        fsync_dir(Path(folder))


def write_atomic(path: Path, content: str | bytes, *, mode: int = 0o600) -> None:
    """Replace `path` by `content`: readers see the old file or the new one, never half."""
    payload = content.encode() if isinstance(content, str) else content
    part = path.with_name(f".{path.name}{PART_SUFFIX}")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(payload)
        file.flush()
        os.fsync(file.fileno())
    fault_point(f"write.{path.name}")
    part.replace(path)
    fsync_dir(path.parent)


def write_json(path: Path, document: Any, *, indent: int | None = 2) -> None:
    """Write `document` as JSON, atomically; NaN is refused because jq cannot read it."""
    write_atomic(path, json.dumps(document, indent=indent, allow_nan=False) + "\n")


def append_line(path: Path, line: str) -> None:
    """Add one line to a story file; a line is one write, so two writers do not mix."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    try:
        os.write(descriptor, (line.rstrip("\n") + "\n").encode())
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


def read_bytes(path: Path, *, limit_bytes: int = READ_LIMIT_BYTES) -> bytes:
    """The content of a plain file.

    Raises:
      FileRefusedError: the file is missing, a link, not a plain file, or over the limit.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise FileRefusedError(f"{path} cannot be read: {error.strerror}") from error
    with os.fdopen(descriptor, "rb") as file:
        facts = os.fstat(file.fileno())
        if not stat.S_ISREG(facts.st_mode):
            raise FileRefusedError(f"{path} is not a plain file; remove it")
        if facts.st_size > limit_bytes:
            raise FileRefusedError(f"{path} has {facts.st_size} bytes, over {limit_bytes}")
        return file.read(limit_bytes + 1)


def read_json(path: Path, *, limit_bytes: int = READ_LIMIT_BYTES) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
      FileRefusedError: as `read_bytes`, or the content is not one JSON object.
    """
    try:
        document = json.loads(read_bytes(path, limit_bytes=limit_bytes))
    except (ValueError, RecursionError) as error:
        raise FileRefusedError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(document, dict):
        raise FileRefusedError(f"{path} holds {type(document).__name__}, not a JSON object")
    return document


def copy_tree(source: Path, target: Path) -> None:
    """Copy plain files and folders to `target`, which must not exist, and make them durable.

    Raises:
      FileRefusedError: something below `source` is a link or a special file.
    """
    _copy_files(list(plain_files(source)), source, target)


def copy_tree_without_links(source: Path, target: Path) -> tuple[Path, ...]:
    """Copy as `copy_tree` does, but leave out links and special files; answers which.

    Raises:
      FileRefusedError: `source` is not a folder.
    """
    left_out: list[Path] = []
    _copy_files(list(plain_files(source, left_out=left_out)), source, target)
    return tuple(left_out)


def _copy_files(files: list[Path], source: Path, target: Path) -> None:
    target.mkdir(mode=0o700, parents=True)
    for file in files:
        place = target / file.relative_to(source)
        make_dir(place.parent)
        shutil.copyfile(file, place, follow_symlinks=False)
    fsync_tree(target)


def copy_file(source: Path, target: Path) -> None:
    """Copy one plain file of any size, atomically and durably."""
    with _open_plain(source) as reader:
        part = target.with_name(f".{target.name}{PART_SUFFIX}")
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as writer:
            shutil.copyfileobj(reader, writer, _CHUNK_BYTES)
            writer.flush()
            os.fsync(writer.fileno())
    part.replace(target)
    fsync_dir(target.parent)


def commit_dir(prepared: Path, final: Path) -> None:
    """Publish a finished folder under its final name, durably; `final` must not exist."""
    fsync_tree(prepared)
    move_dir(prepared, final)


def move_dir(source: Path, target: Path) -> None:
    """Rename a folder within one file system and make both parents durable."""
    make_dir(target.parent)
    if target.exists():
        raise FileRefusedError(f"{target} exists already; move it away")
    source.rename(target)
    fsync_dir(target.parent)
    if source.parent != target.parent:
        fsync_dir(source.parent)


def remove_tree(path: Path) -> None:
    """Remove a folder: first it loses its name at one stroke, then its content."""
    if not path.exists():
        return
    trash = path if path.name.endswith(TRASH_SUFFIX) else _free_name(path)
    if trash != path:
        path.rename(trash)
        fsync_dir(path.parent)
    fault_point("remove_tree.renamed")
    shutil.rmtree(trash)


def sweep(folder: Path) -> None:
    """Remove what a crash left half-removed or half-written directly below `folder`."""
    if not folder.is_dir():
        return
    for entry in list(folder.iterdir()):
        if entry.name.endswith(TRASH_SUFFIX) or entry.name.startswith(".tmp-"):
            remove_tree(entry)
        elif entry.name.endswith(PART_SUFFIX):
            entry.unlink(missing_ok=True)


def plain_files(root: Path, *, left_out: list[Path] | None = None) -> Iterator[Path]:
    """Every plain file below `root`, sorted; what is none is added to `left_out`, if given.

    Raises:
      FileRefusedError: `root` is not a folder, or holds a link or a special file that
        nobody wants to have left out.
    """
    if root.is_symlink() or not root.is_dir():
        raise FileRefusedError(f"{root} is not a folder")
    for path in sorted(root.rglob("*")):
        mode = path.lstat().st_mode
        if stat.S_ISREG(mode):
            yield path
        elif not stat.S_ISDIR(mode):
            if left_out is not None:
                left_out.append(path)
                continue
            raise FileRefusedError(f"{path} is a link or a special file; remove it")


def tree_digest(root: Path) -> str:
    """sha256 over the names and contents of all plain files below `root`, as hex."""
    total = hashlib.sha256()
    for path in plain_files(root):
        content = hashlib.sha256()
        with _open_plain(path) as file:
            while chunk := file.read(_CHUNK_BYTES):
                content.update(chunk)
        total.update(f"{path.relative_to(root).as_posix()}\0{content.hexdigest()}\n".encode())
    return total.hexdigest()


def _open_plain(path: Path):
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    return os.fdopen(descriptor, "rb")


def _fsync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _free_name(path: Path) -> Path:
    for number in range(1_000_000):
        trash = path.with_name(f"{path.name}.{number}{TRASH_SUFFIX}")
        if not trash.exists():
            return trash
    raise FileRefusedError(f"{path.parent} is full of *.trash folders; remove them")
