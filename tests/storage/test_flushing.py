"""What is made durable together is flushed whole, with however few threads and descriptors."""

from __future__ import annotations

import errno
import os
import resource
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from flowrl import storage
from flowrl.storage.atomic import FLUSHERS, flush
from tests.parallel.faults import DONE, in_child, in_clean_process


@pytest.fixture
def tree(tmp_path) -> Path:
    """Thirty files in three folders below a fourth."""
    for number in range(30):
        file = tmp_path / "tree" / f"folder{number % 3}" / str(number)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(str(number))
    return tmp_path / "tree"


def flushed(monkeypatch) -> Counter[str]:
    """How often each name is flushed from now on."""
    names: Counter[str] = Counter()
    monkeypatch.setattr(
        os, "fsync", lambda fd: names.update([Path(f"/proc/self/fd/{fd}").readlink().name])
    )
    return names


def test_every_file_and_folder_of_a_tree_is_flushed_once(tree, monkeypatch):
    seen = flushed(monkeypatch)
    storage.flush_tree(tree)
    wanted = {"tree", *(f"folder{n}" for n in range(3)), *(str(n) for n in range(30))}
    assert seen == dict.fromkeys(wanted, 1)


def test_all_is_flushed_when_no_thread_can_be_started(tree, monkeypatch):
    def refused(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    seen = flushed(monkeypatch)
    storage.flush_tree(tree)
    assert (len(seen), seen.total()) == (34, 34)


def test_one_descriptor_is_enough_to_flush_all(tmp_path):
    files = [tmp_path / str(number) for number in range(30)]
    for file in files:
        file.touch()
    in_clean_process(_flush_with_one_descriptor, files)


def _flush_with_one_descriptor(files: list[Path]) -> None:
    def work() -> None:
        seen: list[int] = []
        refused = threading.Event()
        real = os.open

        def telling(*words: Any) -> int:
            try:
                return real(*words)
            except OSError:
                refused.set()
                raise

        def slow(descriptor: int) -> None:
            refused.wait()
            seen.append(os.fstat(descriptor).st_ino)

        os.open, os.fsync = telling, slow
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, free + 1))
        flush(files)
        assert sorted(seen) == sorted(file.stat().st_ino for file in files)

    assert in_child(work) == DONE


def test_a_flush_that_fails_is_told_once_all_threads_have_ended(tree, monkeypatch):
    place = (tree / "folder2" / "17").stat().st_ino

    def failing(descriptor):
        if os.fstat(descriptor).st_ino == place:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", failing)
    before = threading.active_count()
    with pytest.raises(OSError, match="Input/output"):
        storage.flush_tree(tree)
    assert threading.active_count() == before


def test_nothing_is_begun_any_more_once_a_flush_has_failed(tree, monkeypatch):
    begun = []

    def failing(descriptor):
        begun.append(descriptor)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(OSError, match="Input/output"):
        storage.flush_tree(tree)
    assert len(begun) <= FLUSHERS


def test_a_copy_is_told_with_the_digest_that_its_files_have(tree, tmp_path):
    copies = {tmp_path / "a": tree, tmp_path / "b" / "c": tree / "folder1"}
    digests = storage.copy_trees(copies)
    assert digests == {target: storage.tree_digest(target) for target in copies}
    assert digests[tmp_path / "a"] == storage.tree_digest(tree)


def test_a_large_file_is_copied_whole(tmp_path):
    (tmp_path / "tree").mkdir()
    content = os.urandom(2**20) * 2 + b"end"
    (tmp_path / "tree" / "large").write_bytes(content)
    storage.copy_trees({tmp_path / "copy": tmp_path / "tree"})
    assert (tmp_path / "copy" / "large").read_bytes() == content


def test_if_one_copy_fails_none_is_left(tree, tmp_path, monkeypatch):
    monkeypatch.setenv("FLOWRL_FAULT", "copy.29:raise")
    with pytest.raises(OSError, match="injected"):
        storage.copy_trees({tmp_path / "a": tree / "folder1", tmp_path / "b": tree})
    assert [path.name for path in tmp_path.iterdir()] == ["tree"]


def test_folders_that_move_together_leave_their_old_names(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / f"new_{name}").mkdir()
    storage.move_dirs({tmp_path / f"new_{name}" / "home": tmp_path / name for name in "ab"})
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == [
        "new_a",
        "new_a/home",
        "new_b",
        "new_b/home",
    ]
