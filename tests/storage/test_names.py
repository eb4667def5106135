"""An error of the system that is told names its file, whichever call of the kernel fails."""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flowrl import storage
from flowrl.errors import format_error, is_os_error
from flowrl.storage import locks
from tests.storage.test_writes import PACKAGE

CALLS = (  # of descriptors, for which the kernel's error names no file
    *((os, name) for name in ("write", "fsync", "pread", "fstat")),
    (fcntl, "flock"),
)


def held(path: Path) -> None:
    with locks.held(path, timeout_seconds=1):
        pass


OPERATIONS = {
    "read": lambda at: storage.read_bytes(at / "file"),
    "digest": lambda at: storage.tree_digest(at / "tree"),
    "write": lambda at: storage.write_atomic(at / "file", "new"),
    "append": lambda at: storage.append_line(at / "file", "new"),
    "make a folder": lambda at: storage.make_dir(at / "a" / "b"),
    "copy": lambda at: storage.copy_file(at / "file", at / "copy"),
    "copy a folder": lambda at: storage.copy_tree(at / "tree", at / "copy"),
    "publish a folder": lambda at: storage.commit_dir(at / "tree", at / "moved"),
    "move a folder": lambda at: storage.move_dir(at / "tree", at / "moved"),
    "remove": lambda at: storage.remove_file(at / "file"),
    "remove a folder": lambda at: storage.remove_tree(at / "tree"),
    "lock": lambda at: held(at / "lock"),
    "ask for a lock": lambda at: locks.is_held(at / "file"),
}


def error_of(operation, place: Path, number: int) -> tuple[OSError | None, bool]:
    """The error of an operation in which one call of a descriptor fails, and whether it came."""
    left = number

    def failing(real):
        def call(*given):
            nonlocal left
            left -= 1
            if left == -1:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(*given)

        return call

    found = None
    with ExitStack() as stack:
        for module, name in CALLS:
            stack.enter_context(mock.patch.object(module, name, failing(getattr(module, name))))
        try:
            operation(place)
        except OSError as error:
            found = error
    return found, left < 0


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_whichever_call_fails_the_file_is_named(tmp_path, operation):
    """The first call of a descriptor fails, then the second alone, until none is left to fail."""
    failed, called = 0, True
    while called:
        place = tmp_path / str(failed)
        (place / "tree" / "inner").mkdir(parents=True)
        for path in (place / "file", place / "tree" / "one", place / "tree" / "inner" / "two"):
            path.write_text("old\n")
        error, called = error_of(operation, place, failed)
        assert error is None or str(place) in format_error(error)
        assert error is None or str(place) in str(error)
        failed += called
    assert failed


def test_a_file_that_cannot_be_removed_is_named_with_its_folder(tmp_path, monkeypatch):
    """The kernel names it alone, because it is removed from an open folder."""
    (tmp_path / "tree" / "inner").mkdir(parents=True)
    (tmp_path / "tree" / "inner" / "two").write_text("")
    real = os.unlink

    def failing(path, **how):
        if str(path) == "two":
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        real(path, **how)

    monkeypatch.setattr(os, "unlink", failing)
    with pytest.raises(OSError, match="Input/output") as caught:
        storage.remove_tree(tmp_path / "tree")
    said = format_error(caught.value)
    assert str(tmp_path) in said
    assert said.endswith("/inner/two")


PATHS = st.none() | st.text(min_size=1).map(Path) | st.binary(min_size=1)


@given(st.sampled_from(sorted(errno.errorcode)), PATHS, PATHS)
@example(errno.ENOENT, Path("from"), Path("to"))
def test_all_files_of_an_error_are_told(number, first, second):
    error = OSError(number, os.strerror(number), first, None, second)
    assert is_os_error(error)
    said = format_error(error)
    assert said.startswith(os.strerror(number))
    assert all(os.fsdecode(path) in said for path in (first, second if first else None) if path)


def test_no_reason_is_told_without_its_file():
    """`strerror` is what an error says of itself without a name."""
    apart = {"errors.py", "storage/__init__.py"}  # which add it
    found = [path for path in PACKAGE.rglob("*.py") if "error.strerror" in path.read_text()]
    assert {path.relative_to(PACKAGE).as_posix() for path in found} == apart
