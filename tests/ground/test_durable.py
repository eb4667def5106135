"""Files and folders appear whole or not at all, also when the writer is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from flowrl import durable
from flowrl.errors import FileRefusedError


def run_with_fault(code: str, fault: str) -> int:
    environment = {**os.environ, "FLOWRL_FAULT": fault}
    return subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode


def test_a_write_replaces_the_whole_file(tmp_path):
    path = tmp_path / "state.json"
    durable.write_atomic(path, "old " * 1000)
    durable.write_atomic(path, "new")
    assert path.read_text() == "new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.json"]


def test_a_file_is_readable_by_its_owner_alone(tmp_path):
    durable.write_json(tmp_path / "spec.json", {"secret": 1})
    assert (tmp_path / "spec.json").stat().st_mode & 0o777 == 0o600


def test_a_writer_killed_before_the_swap_leaves_the_old_file(tmp_path):
    path = tmp_path / "state.json"
    path.write_text("old")
    code = f"from flowrl import durable; durable.write_atomic(durable.Path({str(path)!r}), 'new')"
    assert run_with_fault(code, "write.state.json:kill") == -signal.SIGKILL
    assert path.read_text() == "old"
    durable.sweep(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.json"]


@pytest.mark.parametrize("fault", ["raise", "enospc"])
def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch, fault):
    path = tmp_path / "state.json"
    path.write_text("old")
    monkeypatch.setenv("FLOWRL_FAULT", f"write.state.json:{fault}")
    with pytest.raises(OSError, match="injected"):
        durable.write_atomic(path, "new")
    assert path.read_text() == "old"


def test_nan_is_refused_in_json(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        durable.write_json(tmp_path / "x.json", {"loss": float("nan")})
    assert not list(tmp_path.iterdir())


def test_a_removal_killed_half_way_is_finished_by_the_sweep(tmp_path):
    tree = tmp_path / "run"
    (tree / "deep").mkdir(parents=True)
    (tree / "deep" / "file").write_text("x")
    code = f"from flowrl import durable; durable.remove_tree(durable.Path({str(tree)!r}))"
    assert run_with_fault(code, "remove_tree.renamed:kill") == -signal.SIGKILL
    assert not tree.exists()
    durable.sweep(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_tree_is_copied_bit_for_bit(tmp_path):
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    (source / "sub" / "a.bin").write_bytes(bytes(range(256)))
    durable.copy_tree(source, tmp_path / "copy")
    assert durable.tree_digest(source) == durable.tree_digest(tmp_path / "copy")


def test_one_flipped_bit_changes_the_digest(tmp_path):
    tree = tmp_path / "expert"
    tree.mkdir()
    (tree / "array").write_bytes(b"\x00" * 64)
    before = durable.tree_digest(tree)
    (tree / "array").write_bytes(b"\x00" * 63 + b"\x01")
    assert durable.tree_digest(tree) != before


def test_a_renamed_file_changes_the_digest(tmp_path):
    tree = tmp_path / "expert"
    tree.mkdir()
    (tree / "actor").write_bytes(b"x")
    before = durable.tree_digest(tree)
    (tree / "actor").rename(tree / "critic")
    assert durable.tree_digest(tree) != before


def test_links_are_never_followed(tmp_path):
    tree = tmp_path / "expert"
    tree.mkdir()
    (tree / "passwd").symlink_to("/etc/passwd")
    with pytest.raises(FileRefusedError, match="link"):
        durable.copy_tree(tree, tmp_path / "copy")
    with pytest.raises(FileRefusedError, match="cannot be read"):
        durable.read_bytes(tree / "passwd")
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [("[1]", "not a JSON object"), ('{"a":', "not valid JSON"), ("[" * 100_000, "not valid JSON")],
    ids=["a list", "torn", "a nesting bomb"],
)
def test_what_is_no_json_object_is_refused(tmp_path, content, message):
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(FileRefusedError, match=message):
        durable.read_json(path)


def test_a_file_over_the_limit_is_refused(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("{" + " " * 100 + "}")
    with pytest.raises(FileRefusedError, match="over 50"):
        durable.read_json(path, limit_bytes=50)


def test_a_pipe_is_refused_without_waiting_for_its_writer(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileRefusedError, match="plain file"):
        durable.read_bytes(tmp_path / "pipe")


def test_a_folder_is_not_moved_over_another(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with pytest.raises(FileRefusedError, match="exists already"):
        durable.commit_dir(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a").is_dir()


def test_a_file_is_cut_where_it_should_be_and_never_grows(tmp_path):
    path = tmp_path / "lines"
    path.write_text("one\ntwo\n")
    durable.cut(path, 100)
    assert path.read_text() == "one\ntwo\n"
    durable.cut(path, 4)
    assert path.read_text() == "one\n"
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(OSError, match="link"):
        durable.cut(tmp_path / "link", 0)


def test_a_copy_without_links_says_what_it_left_out(tmp_path):
    tree = tmp_path / "tree"
    (tree / "deep").mkdir(parents=True)
    (tree / "deep" / "file").write_text("here")
    (tree / "passwd").symlink_to("/etc/passwd")
    (tree / "folder").symlink_to(tmp_path)
    left_out = durable.copy_tree_without_links(tree, tmp_path / "copy")
    assert left_out == (tree / "folder", tree / "passwd")
    found = [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("copy/**/*"))]
    assert found == ["copy/deep", "copy/deep/file"]
