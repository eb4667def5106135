"""Files on disk: read without trust, written, copied, moved and removed whole or not at all.

**Reading** takes plain files only, of bounded size, never a link: other processes may have written
them. **Writing**: the content goes into a `.part` file, is flushed, and is renamed over the old
file; the folder is flushed after. A `.part` file is locked by its writer, so that one of a dead
process can be told apart and removed. A file that cannot be flushed is given up, never flushed
again: the kernel may have dropped its content meanwhile. **A copy** has bytes of its own on the
disk: a process that can still write to the source cannot change the copy.

At the **fault points** a test kills the process or fails the disk: `FLOWRL_FAULT=<name>:<mode>`
names one of them. `kill` ends the process there, `raise` is an I/O error, `enospc` a full disk, and
`torn` writes half of the data before the process is killed.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import signal
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from flowrl.errors import ConfigError, FileRefusedError, TornFileError

READ_LIMIT_BYTES = 64 * 2**20
CACHED_SECONDS = 1.0  # FUSE's default: for so long a file may seem to have another size
_PART_SUFFIX, _TRASH_SUFFIX = ".part", ".trash"
_BEING_REMOVED = ".being_removed"  # a link in a folder that is removed in its place
_CHUNK_BYTES = 2**20
_REMEDY = "restore it from a copy, or name another"
_Parsed = TypeVar("_Parsed")
RIGHTS = "let its owner give you the right to read it"
_PLAIN_NEW = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
# These mean that the file itself is wrong. Others, such as a lack of descriptors, may pass.
_REFUSED = frozenset(
    getattr(errno, name)
    for name in ["EACCES", "EISDIR", "ELOOP", "ENAMETOOLONG", "ENOENT", "ENOTDIR", "ENXIO", "EPERM"]
)
_VARIABLE = "FLOWRL_FAULT"
_ERRORS = {
    "raise": (errno.EIO, "Input/output error (injected)"),
    "enospc": (errno.ENOSPC, "No space left on device (injected)"),
}
_MODES = ("kill", *_ERRORS, "torn")


def fault_point(name: str) -> None:
    """Die or fail here when the environment says so; ConfigError if it says it wrongly."""
    mode = _mode_at(name)
    if mode == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "torn":
        raise ConfigError(f"{_VARIABLE}={name}:torn: nothing is written there; use kill")
    if mode:
        number, words = _ERRORS[mode]
        raise OSError(number, words, name)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Give an error of the system in the block this file's name, if it has none.

    The kernel's errors of an open descriptor name no file.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    """Yield a descriptor; an error in the block names the file."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        with naming(path):
            yield descriptor
    finally:
        os.close(descriptor)


def open_plain(path: Path, *, remedy: str = _REMEDY) -> BufferedReader:
    """Open a plain file for reading; never waits for the writer of a pipe.

    FileRefusedError: it is missing or not plain; says the `remedy`. OSError: it cannot be opened
    now.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        link = "it is a link, and flowrl follows none" if path.is_symlink() else error.strerror
        remedy = RIGHTS if isinstance(error, PermissionError) else remedy
        raise FileRefusedError(f"{path} cannot be read: {link}; {remedy}") from error
    with naming(path):
        mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise FileRefusedError(f"{path} is no plain file; {remedy}")
    return os.fdopen(descriptor, "rb")


def read_bytes(path: Path, *, limit_bytes: int = READ_LIMIT_BYTES, remedy: str = _REMEDY) -> bytes:
    """Read a plain file of at most `limit_bytes`; raises as `open_plain` does."""
    with open_plain(path, remedy=remedy) as file, naming(path):
        content = file.read(limit_bytes + 1)
    if len(content) > limit_bytes:
        raise FileRefusedError(f"{path} has over {limit_bytes:,} bytes; {remedy}")
    return content


def read_parsed(path: Path, parse: Callable[[bytes], _Parsed], **options: Any) -> _Parsed:
    """Return what `parse` makes of the bytes that `read_bytes` reads; raises as both do.

    A file that another host replaces meanwhile may be cut at the size of its other content. So one
    that `parse` refuses by TornFileError is read once more.
    """
    content = read_bytes(path, **options)
    with suppress(TornFileError):
        return parse(content)
    time.sleep(CACHED_SECONDS)
    return parse(read_bytes(path, **options))


def read_json(
    path: Path, *, limit_bytes: int = READ_LIMIT_BYTES, remedy: str = _REMEDY
) -> dict[str, Any]:
    """Read one JSON object without NaN; raises as `read_parsed` does."""
    parse = partial(json_object, path, remedy=remedy)
    return read_parsed(path, parse, limit_bytes=limit_bytes, remedy=remedy)


def json_object(path: Path, content: bytes, *, remedy: str = _REMEDY) -> dict[str, Any]:
    """Return the JSON object, without NaN, in a file's content; TornFileError: it is no JSON."""
    try:
        document = json.loads(content, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise TornFileError(f"{path} is not valid JSON: {error}; {remedy}") from error
    if not isinstance(document, dict):
        what = type(document).__name__
        raise FileRefusedError(f"{path} holds {what}, not a JSON object; {remedy}")
    return document


def plain_files(root: Path, *, left_out: list[Path] | None = None) -> Iterator[Path]:
    """Yield every plain file below `root`, sorted.

    Links and special files are added to `left_out` if it is given, and refused otherwise.
    """
    if root.is_symlink() or not root.is_dir():
        raise FileRefusedError(f"{root} is not a folder")
    for path in sorted(_everything(root)):
        mode = path.lstat().st_mode
        if stat.S_ISREG(mode):
            yield path
        elif stat.S_ISDIR(mode):
            continue
        elif left_out is not None:
            left_out.append(path)
        else:
            raise FileRefusedError(f"{path} is a link or a special file; remove it")


def tree_digest(root: Path) -> str:
    """Return the sha256 over the names and contents of all plain files below `root`, as hex."""
    total = hashlib.sha256()
    for path in plain_files(root):
        with open_plain(path) as file, naming(path):
            content = hashlib.file_digest(file, "sha256").hexdigest()
        total.update(f"{path.relative_to(root).as_posix()}\0{content}\n".encode())
    return total.hexdigest()


def write_atomic(path: Path, content: str | bytes | memoryview, *, durable: bool = True) -> None:
    """Replace `path` by `content`: readers see the old file or the new one, never half.

    Of several writers at once the last one wins. With `durable=False` the file may be lost or
    damaged after a power cut: for files that the caller flushes, or that can be made again.
    """
    payload = content.encode() if isinstance(content, str) else content
    point = f"write.{path.name}"
    with _replacing(path, point, durable=durable) as descriptor:
        _write_all(descriptor, payload, point)


def write_json(path: Path, document: Any, *, durable: bool = True) -> None:
    """Write `document` as JSON, as `write_atomic` does; NaN is refused because jq refuses it."""
    write_atomic(path, json.dumps(document, indent=2, allow_nan=False) + "\n", durable=durable)


def append_line(path: Path, line: str) -> None:
    """Add one line to a log; a line is one write, so the lines of two writers do not mix.

    A line that a full disk or a kill tore stays torn, and the next one begins below it.
    """
    with _opened(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW) as descriptor:
        size = os.fstat(descriptor).st_size
        torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        text = "\n" * torn + line.rstrip("\n") + "\n"
        _write_all(descriptor, text.encode(), f"append.{path.name}")


def make_dir(path: Path, *, durable: bool = True, parents: bool = True) -> Path:
    """Make `path` and its missing parents, for their owner alone; flushed if `durable`.

    Without `parents` a missing one is a FileNotFoundError.
    """
    if path.is_dir():
        return path
    if parents:
        make_dir(path.parent, durable=durable)
    with suppress(FileExistsError):  # another process may be making it, too
        path.mkdir(mode=0o700)
    if not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "Not a directory", str(path))
    if durable:
        flush(path.parent)
    return path


def try_writing(folder: Path) -> None:
    """Write a file without a name into a folder, or into the next one above it that is there.

    Raises OSError where none can be written; nothing is left on disk.
    """
    place = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    tempfile.TemporaryFile(dir=place).close()


def make_file(path: Path) -> None:
    """Make an empty file, readable by its owner alone; an existing file stays as it is."""
    os.close(os.open(path, _PLAIN_NEW, 0o600))


def flush(path: Path) -> None:
    """Make one file, or the names in one folder, durable."""
    with _opened(path, os.O_RDONLY | os.O_NONBLOCK) as descriptor:
        os.fsync(descriptor)


def copy_file(source: Path, target: Path) -> None:
    """Copy one plain file of any size, atomically and durably."""
    point = f"copy.{target.name}"
    with _replacing(target, point) as descriptor:
        _copy_content(source, descriptor, point)


def copy_tree(source: Path, target: Path, *, left_out: list[Path] | None = None) -> str:
    """Copy the plain files and folders of `source` to `target`; returns the copy's `tree_digest`.

    The copy is not durable before `commit_dir` publishes it, so `target` is a new name that nobody
    reads. Links and special files are added to `left_out`, or refused without it. A copy that
    fails is removed: a full disk needs the space.
    """
    total = hashlib.sha256()
    files = list(plain_files(source, left_out=left_out))
    make_dir(target.parent)
    target.mkdir(mode=0o700)
    try:
        for file in files:
            inside = file.relative_to(source)
            make_dir((target / inside).parent, durable=False)
            with _opened(target / inside, _PLAIN_NEW | os.O_EXCL) as descriptor:
                content = _copy_content(file, descriptor, f"copy.{file.name}")
            total.update(f"{inside.as_posix()}\0{content}\n".encode())
    except BaseException:
        remove_unread_tree(target)
        raise
    return total.hexdigest()


@contextmanager
def building(final: Path) -> Iterator[Path]:
    """Yield the path of a folder to make; after the block it is `final`, whole and durable.

    `final` must not exist. If the block fails, nothing stays. What a killed process left under the
    other name is removed first, and `remove_leftovers` removes it, too.
    """
    prepared = final.with_name(f".tmp-{final.name}")
    remove_tree(prepared)
    try:
        yield prepared
        commit_dir(prepared, final)
    except BaseException:
        remove_unread_tree(prepared)
        raise


def commit_dir(prepared: Path, final: Path) -> None:
    """Publish a finished folder under its final name, durably; `final` must not exist."""
    for path in _everything(prepared):
        flush(path)
    move_dir(prepared, final)


def move_dir(source: Path, target: Path) -> None:
    """Rename a folder durably; FileRefusedError if the target exists.

    A folder that cannot be renamed, as those in a lower layer of an overlay file system, is copied
    and then removed; its links and special files are left out.
    """
    make_dir(target.parent)
    if os.path.lexists(target):
        raise FileRefusedError(f"{target} exists already; move it away")
    try:
        source.rename(target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        with building(target) as copy:
            copy_tree(source, copy, left_out=[])
        remove_tree(source)
    for parent in dict.fromkeys((target.parent, source.parent)):
        flush(parent)


def remove_file(path: Path) -> None:
    """Remove a file or a link durably; a missing one is no error."""
    with suppress(FileNotFoundError):
        path.unlink()
        flush(path.parent)


def remove_tree(path: Path) -> None:
    """Remove a folder: rename it to a `.trash` name first, then remove its content.

    One that cannot be renamed is marked by a link in it, which is removed last. A link is removed
    itself, never what it points to.
    """
    trash = path if path.name.endswith(_TRASH_SUFFIX) else _renamed_or_marked(path)
    if trash is None:
        return
    fault_point("remove_tree.renamed")
    if trash.is_symlink() or not trash.is_dir():
        trash.unlink(missing_ok=True)
    while os.path.lexists(trash):
        with suppress(FileNotFoundError), naming(trash):  # another process removes it, too
            for child in list(trash.iterdir()):
                if child.is_dir() and not child.is_symlink():
                    shutil.rmtree(child, onerror=_fail_by_path)
                elif child.name != _BEING_REMOVED:
                    child.unlink()
            shutil.rmtree(trash, onerror=_fail_by_path)
    flush(trash.parent)


def _fail_by_path(_: Any, path: str, raised: Any) -> NoReturn:
    """Name the whole path in an error of `rmtree`, which names what is below an open folder."""
    error: OSError = raised[1]
    error.filename = path
    raise error


def _renamed_or_marked(path: Path) -> Path | None:
    """Give a folder a `.trash` name, or mark it; returns its new path, None if it is missing."""
    trash = path.with_name(f"{path.name}.{secrets.token_hex(4)}{_TRASH_SUFFIX}")
    try:
        path.rename(trash)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        with suppress(FileExistsError):
            (path / _BEING_REMOVED).symlink_to(_BEING_REMOVED)
        flush(path)
        return path
    flush(path.parent)
    return trash


def remove_unread_tree(path: Path) -> None:
    """Remove a folder that nobody reads; `remove_leftovers` removes what an error leaves of it."""
    shutil.rmtree(path, ignore_errors=True)


def remove_part_files(folder: Path) -> None:
    """Remove the `.part` files that dead writers left directly below `folder`."""
    for part in list(folder.glob(f".*{_PART_SUFFIX}")):
        # One that is published or removed meanwhile, or is no file of flowrl, is left.
        with suppress(OSError), _opened(part, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK) as it:
            fcntl.flock(it, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails if its writer lives
            part.unlink()


def remove_leftovers(folder: Path) -> None:
    """Remove what a crash left half removed or half written directly below `folder`."""
    if folder.is_dir():
        for entry in list(folder.iterdir()):
            named = entry.name.endswith(_TRASH_SUFFIX) or entry.name.startswith(".tmp-")
            if named or (not entry.is_symlink() and (entry / _BEING_REMOVED).is_symlink()):
                remove_tree(entry)
        remove_part_files(folder)


@contextmanager
def _replacing(path: Path, point: str, *, durable: bool = True) -> Iterator[int]:
    """Yield a descriptor; after the block, what was written to it replaces `path`.

    If the block fails, the old file stays. `point` is the fault point before the rename.
    """
    # Opened first: after the rename, a lack of descriptors must not keep it from being durable.
    with _opened(path.parent, os.O_RDONLY | os.O_DIRECTORY) as folder, naming(path):
        part, descriptor = _new_part(path)
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


def _new_part(path: Path) -> tuple[Path, int]:
    """Make a `.part` file beside `path`; its lock says that its writer lives."""
    while True:
        part = path.with_name(f".{path.name}.{secrets.token_hex(4)}{_PART_SUFFIX}")
        descriptor = os.open(part, _PLAIN_NEW | os.O_EXCL, 0o600)
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_nlink:
                return part, descriptor
        os.close(descriptor)  # `remove_part_files` came between the two calls


def _write_all(descriptor: int, payload: bytes | memoryview, point: str) -> None:
    """Write the whole payload; a nearly full disk takes only the beginning of one write."""
    torn = _mode_at(point) == "torn"
    rest = memoryview(payload)[: len(payload) // 2 if torn else None]
    while rest:
        rest = rest[os.write(descriptor, rest) :]
    if torn:
        os.kill(os.getpid(), signal.SIGKILL)


def _copy_content(source: Path, descriptor: int, point: str) -> str:
    """Copy one file's bytes; returns their sha256."""
    content = hashlib.sha256()
    for chunk in _chunks(source):
        content.update(chunk)
        _write_all(descriptor, chunk, point)
    fault_point(point)
    return content.hexdigest()


def _chunks(source: Path) -> Iterator[bytes]:
    """Yield the content of a plain file; an error of reading names it."""
    with open_plain(source) as reader, naming(source):
        while chunk := reader.read(_CHUNK_BYTES):
            yield chunk


def _everything(root: Path) -> Iterable[Path]:
    """Yield every file, link and folder below `root`, then `root` itself."""

    def fail(error: OSError) -> NoReturn:
        raise error  # a folder that cannot be listed would otherwise count as empty

    for folder, folders, names in os.walk(root, topdown=False, onerror=fail):
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]  # noqa: PTH114,PTH118
        yield from (Path(folder, name) for name in (*names, *links))
        yield Path(folder)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


def _mode_at(name: str) -> str:
    """Return the mode for this point; empty when the variable names another one."""
    value = os.environ.get(_VARIABLE)
    if not value:
        return ""
    point, _, mode = value.rpartition(":")
    if not point or mode not in _MODES:
        raise ConfigError(f"{_VARIABLE}={value!r} is not <name>:<mode>; use {', '.join(_MODES)}")
    return mode if point == name else ""
