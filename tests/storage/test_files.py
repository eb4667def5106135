"""Files and folders appear whole or not at all, also when the writer is killed."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, Thread

import pytest

from flowrl import storage
from flowrl.errors import ConfigError, FileRefusedError

IMPORTS = "from pathlib import Path; from flowrl import storage;"


def run_with_fault(code: str, fault: str) -> int:
    environment = {**os.environ, "FLOWRL_FAULT": fault}
    return subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode


def test_a_write_replaces_the_whole_file(tmp_path):
    path = tmp_path / "state.json"
    storage.write_atomic(path, "old " * 1000)
    storage.write_atomic(path, "new")
    assert path.read_text() == "new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.json"]


@pytest.mark.parametrize("fault", ["raise", "enospc"])
def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch, fault):
    path = tmp_path / "state.json"
    path.write_text("old")
    monkeypatch.setenv("FLOWRL_FAULT", f"write.state.json:{fault}")
    with pytest.raises(OSError, match="injected"):
        storage.write_atomic(path, "new")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.json"]


@pytest.mark.parametrize(("fault", "left"), [("kill", "abcd"), ("torn", "ab")])
def test_a_killed_writer_leaves_what_it_wrote_beside_the_old_file(tmp_path, fault, left):
    path = tmp_path / "state.json"
    path.write_text("old")
    code = f"{IMPORTS} storage.write_atomic(Path({str(path)!r}), 'abcd')"
    assert run_with_fault(code, f"write.state.json:{fault}") == -signal.SIGKILL
    assert path.read_text() == "old"
    (part,) = tmp_path.glob(".state.json.*.part")
    assert part.read_text() == left
    storage.remove_leftovers(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.json"]


def test_a_torn_copy_is_never_published(tmp_path):
    (tmp_path / "a").write_text("abcd")
    paths = f"Path({str(tmp_path / 'a')!r}), Path({str(tmp_path / 'b')!r})"
    code = f"{IMPORTS} storage.copy_file({paths})"
    assert run_with_fault(code, "copy.b:torn") == -signal.SIGKILL
    assert not (tmp_path / "b").exists()


def test_the_line_after_a_torn_one_begins_below_it(tmp_path):
    path = tmp_path / "events.jsonl"
    storage.append_line(path, "first")
    code = f"{IMPORTS} storage.append_line(Path({str(path)!r}), 'second')"
    assert run_with_fault(code, "append.events.jsonl:torn") == -signal.SIGKILL
    storage.append_line(path, "third")
    assert path.read_text() == "first\nsec\nthird\n"


def test_an_empty_fault_is_none(tmp_path, monkeypatch):
    monkeypatch.setenv("FLOWRL_FAULT", "")
    storage.write_atomic(tmp_path / "x", "new")
    assert (tmp_path / "x").read_text() == "new"


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("here:explode", "use kill, raise, enospc, torn"),
        ("here", "use kill, raise, enospc, torn"),
        ("here:torn", "nothing is written there"),
    ],
)
def test_a_fault_that_cannot_be_is_an_error_and_no_other_fault(monkeypatch, fault, words):
    monkeypatch.setenv("FLOWRL_FAULT", fault)
    with pytest.raises(ConfigError, match=words):
        storage.fault_point("here")


def _write_in_its_own_process(path: str, letter: str, barrier) -> None:
    barrier.wait(timeout=200)
    for _ in range(50):
        storage.write_atomic(Path(path), letter * 100_000)


def test_of_two_writers_at_once_each_writes_the_whole_file(tmp_path):
    path = tmp_path / "notice.json"
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(3)
    writers = [
        context.Process(target=_write_in_its_own_process, args=(str(path), letter, barrier))
        for letter in "ab"
    ]
    for writer in writers:
        writer.start()
    barrier.wait(timeout=200)
    seen = set()
    while any(writer.is_alive() for writer in writers):
        storage.remove_part_files(tmp_path)  # takes no living writer's file away
        if path.exists():
            text = path.read_text()
            seen.add((text[:1], len(text), len(set(text))))
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert seen <= {("a", 100_000, 1), ("b", 100_000, 1)}
    assert [entry.name for entry in tmp_path.iterdir()] == ["notice.json"]


def test_a_sweep_that_takes_a_new_part_away_makes_its_writer_take_another(tmp_path, monkeypatch):
    taken = []

    def with_a_sweep_before(descriptor, operation):
        if not taken:
            taken.append(True)
            for part in tmp_path.iterdir():
                part.unlink()
        real(descriptor, operation)

    real = fcntl.flock
    monkeypatch.setattr(fcntl, "flock", with_a_sweep_before)
    storage.write_atomic(tmp_path / "x", "new")
    assert taken
    assert (tmp_path / "x").read_text() == "new"


def test_what_could_not_be_flushed_is_given_up_and_never_flushed_again(tmp_path, monkeypatch):
    """A second fsync of the same descriptor may say that all is well when nothing is."""
    path = tmp_path / "state.json"
    path.write_text("old")
    flushed = []

    def failing(descriptor):
        flushed.append(os.fstat(descriptor).st_ino)
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing)
        with pytest.raises(OSError, match="Input/output"):
            storage.write_atomic(path, "new")
    assert len(flushed) == 1
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.json"]


def flushes(monkeypatch) -> list[tuple[str, list[str]]]:
    """What is flushed from now on, and which names are in that folder at this moment."""
    seen = []
    real = os.fsync

    def recording(descriptor):
        place = Path(f"/proc/self/fd/{descriptor}").readlink()
        names = sorted(p.name for p in place.iterdir()) if place.is_dir() else []
        seen.append((place.name, names))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", recording)
    return seen


def test_a_file_is_flushed_before_its_name_and_its_folder_after(tmp_path, monkeypatch):
    seen = flushes(monkeypatch)
    storage.write_atomic(tmp_path / "x", "new")
    assert seen[0][0].endswith(".part")
    assert seen[1:] == [(tmp_path.name, ["x"])]


def test_a_removed_tree_s_folder_is_flushed_before_and_after(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    seen = flushes(monkeypatch)
    storage.remove_tree(tmp_path / "run")
    (before, (trash,)), after = seen
    assert (before, trash[:4], trash[-6:]) == (tmp_path.name, "run.", ".trash")
    assert after == (tmp_path.name, [])


def test_new_folders_are_durable_and_their_owner_s_alone(tmp_path, monkeypatch):
    seen = flushes(monkeypatch)
    storage.make_dir(tmp_path / "a" / "b")
    assert seen == [(tmp_path.name, ["a"]), ("a", ["b"])]
    for folder in (tmp_path / "a", tmp_path / "a" / "b"):
        assert folder.stat().st_mode & 0o777 == 0o700
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        storage.make_dir(tmp_path / "file")


def test_a_file_and_a_copy_are_their_owner_s_alone(tmp_path):
    tree = tmp_path / "tree"
    (tree / "deep").mkdir(parents=True)
    (tree / "deep" / "file").touch(mode=0o644)
    storage.copy_tree(tree, tmp_path / "copy")
    storage.copy_file(tree / "deep" / "file", tmp_path / "file")
    storage.write_json(tmp_path / "spec.json", {"secret": 1})
    assert (tmp_path / "copy" / "deep").stat().st_mode & 0o777 == 0o700
    for file in ("copy/deep/file", "file", "spec.json"):
        assert (tmp_path / file).stat().st_mode & 0o777 == 0o600


def test_nothing_is_written_into_a_folder_that_is_gone(tmp_path):
    for write in (storage.write_atomic, storage.append_line):
        with pytest.raises(FileNotFoundError):
            write(tmp_path / "gone" / "x", "new")
    assert not list(tmp_path.iterdir())


def test_a_copy_that_fails_takes_no_room(tmp_path, monkeypatch):
    tree = tmp_path / "tree"
    (tree / "deep").mkdir(parents=True)
    (tree / "deep" / "a").write_text("a")
    (tree / "deep" / "b").write_text("b")
    monkeypatch.setenv("FLOWRL_FAULT", "copy.b:enospc")
    with pytest.raises(OSError, match="injected"):
        storage.copy_tree(tree, tmp_path / "copy")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tree"]


def _append_with_little_room(path: str) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
    storage.append_line(Path(path), "second")


def test_a_line_for_which_there_is_half_the_room_is_an_error(tmp_path):
    path = tmp_path / "events.jsonl"
    storage.append_line(path, "first")
    child = multiprocessing.get_context("spawn").Process(
        target=_append_with_little_room, args=(str(path),)
    )
    child.start()
    child.join()
    assert child.exitcode == 1
    assert path.read_text() == "first\nseco"
    storage.append_line(path, "third")
    assert path.read_text() == "first\nseco\nthird\n"


def test_a_link_is_removed_and_what_it_points_to_stays(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "link").symlink_to("kept")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "file").touch()
    for name in ("link", "dangling", "file", "not there"):
        storage.remove_tree(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_several_may_remove_one_tree_at_once(tmp_path):
    with ThreadPoolExecutor(4) as pool:
        for number in range(20):
            tree = tmp_path / f"{number}.trash"  # a sweep's view: all remove it under one name
            for deep in range(30):
                (tree / str(deep)).mkdir(parents=True)
            list(pool.map(storage.remove_tree, [tree] * 4))
    assert not list(tmp_path.iterdir())


def test_a_sweep_leaves_other_people_s_files_alone(tmp_path):
    for name in ("film.part", "notes.txt", ".hidden"):
        (tmp_path / name).touch()
    (tmp_path / ".state.json.part").touch()
    storage.remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".hidden", "film.part", "notes.txt"]


def test_a_lack_of_descriptors_is_no_damage_of_the_file(tmp_path, monkeypatch):
    path = tmp_path / "manifest.json"
    path.write_text("{}")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    first = os.dup(0)
    os.close(first)
    resource.setrlimit(resource.RLIMIT_NOFILE, (first, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            storage.read_json(path)
        with pytest.raises(OSError, match="Too many open files"):
            storage.tree_digest(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert storage.read_json(path) == {}


def test_nan_is_refused_in_json(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        storage.write_json(tmp_path / "x.json", {"loss": float("nan")})
    assert not list(tmp_path.iterdir())


def test_a_removal_killed_half_way_is_finished_by_the_sweep(tmp_path):
    tree = tmp_path / "run"
    (tree / "deep").mkdir(parents=True)
    (tree / "deep" / "file").write_text("x")
    code = f"{IMPORTS} storage.remove_tree(Path({str(tree)!r}))"
    assert run_with_fault(code, "remove_tree.renamed:kill") == -signal.SIGKILL
    assert not tree.exists()
    storage.remove_leftovers(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "change",
    [
        lambda file: file.write_bytes(b"\x00" * 63 + b"\x01"),
        lambda file: file.rename(file.with_name("critic")),
    ],
    ids=["one flipped bit", "a renamed file"],
)
def test_a_change_of_a_tree_changes_its_digest(tmp_path, change):
    file = tmp_path / "actor"
    file.write_bytes(b"\x00" * 64)
    before = storage.tree_digest(tmp_path)
    change(file)
    assert storage.tree_digest(tmp_path) != before


def test_links_are_never_followed(tmp_path):
    tree = tmp_path / "expert"
    tree.mkdir()
    (tree / "passwd").symlink_to("/etc/passwd")
    with pytest.raises(FileRefusedError, match="link"):
        storage.copy_tree(tree, tmp_path / "copy")
    with pytest.raises(FileRefusedError, match="cannot be read"):
        storage.read_bytes(tree / "passwd")
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
        storage.read_json(path)


@pytest.mark.skipif(shutil.which("bindfs") is None, reason="bindfs is missing")
def test_a_file_that_is_replaced_behind_a_fuse_mount_is_read_whole(tmp_path, monkeypatch):
    there, here = tmp_path / "there", tmp_path / "here"
    for folder in (there, here):
        folder.mkdir()
    storage.write_json(there / "x.json", {})
    if subprocess.run(["bindfs", there, here], check=False).returncode:
        pytest.skip("no FUSE mount is allowed here")
    over = Event()

    def replace() -> None:
        while not over.wait(0.005):
            text = "x" * random.randrange(1000)
            storage.write_json(there / "x.json", {"x": text}, durable=False)

    def end_replacing(_seconds: float = 0.0) -> None:
        over.set()
        replacing.join()

    monkeypatch.setattr(storage.time, "sleep", end_replacing)  # once a file was torn
    replacing = Thread(target=replace)
    replacing.start()
    try:
        for _ in range(2000):
            assert storage.read_json(here / "x.json").keys() <= {"x"}
            if over.is_set():
                break
    finally:
        end_replacing()
        subprocess.run(["umount", here], check=True)


def test_a_file_over_the_limit_is_refused(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("{" + " " * 100 + "}")
    with pytest.raises(FileRefusedError, match="over 50"):
        storage.read_json(path, limit_bytes=50)


def test_a_pipe_is_refused_without_waiting_for_its_writer(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileRefusedError, match="plain file"):
        storage.read_bytes(tmp_path / "pipe")


def test_a_folder_is_not_moved_over_another(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with pytest.raises(FileRefusedError, match="exists already"):
        storage.commit_dir(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a").is_dir()


def test_a_copy_without_links_says_what_it_left_out(tmp_path):
    tree = tmp_path / "tree"
    (tree / "deep").mkdir(parents=True)
    (tree / "deep" / "file").write_text("here")
    (tree / "passwd").symlink_to("/etc/passwd")
    (tree / "folder").symlink_to(tmp_path)
    left_out: list[Path] = []
    storage.copy_tree(tree, tmp_path / "copy", left_out=left_out)
    assert left_out == [tree / "folder", tree / "passwd"]
    found = [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("copy/**/*"))]
    assert found == ["copy/deep", "copy/deep/file"]


def test_nobody_waits_for_the_disk_where_nothing_need_last(tmp_path, monkeypatch):
    seen = flushes(monkeypatch)
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "file").write_text("content")
    folder = storage.make_dir(tmp_path / "a" / "b", durable=False)
    storage.write_json(folder / "x.json", {"x": 1}, durable=False)
    storage.copy_tree(tmp_path / "source", folder / "copy")
    assert not seen
    assert storage.read_json(folder / "x.json") == {"x": 1}
    assert (folder / "copy" / "file").read_text() == "content"


def test_every_file_and_folder_is_flushed_once_before_it_gets_its_name(tmp_path, monkeypatch):
    for number in range(6):
        file = tmp_path / "tree" / f"folder{number % 3}" / str(number)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(str(number))
    seen = flushes(monkeypatch)
    storage.commit_dir(tmp_path / "tree", tmp_path / "final")
    below = {"tree", *(f"folder{n}" for n in range(3)), *(str(n) for n in range(6))}
    assert {name for name, _ in seen[:-1]} == below
    assert len(seen) == len(below) + 1
    assert seen[-1] == (tmp_path.name, ["final"])


def test_a_tree_with_a_file_that_cannot_be_flushed_gets_no_name(tmp_path, monkeypatch):
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "file").touch()

    def failing(descriptor):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(OSError, match="Input/output"):
        storage.commit_dir(tmp_path / "tree", tmp_path / "final")
    assert [path.name for path in tmp_path.iterdir()] == ["tree"]


def test_a_copy_has_the_digest_that_is_returned_and_its_files_are_whole(tmp_path):
    tree, copy = tmp_path / "tree", tmp_path / "copy"
    (tree / "sub").mkdir(parents=True)
    content = os.urandom(2**20) * 2 + b"end"
    (tree / "sub" / "large").write_bytes(content)
    digest = storage.copy_tree(tree, copy)
    assert digest == storage.tree_digest(copy) == storage.tree_digest(tree)
    assert (copy / "sub" / "large").read_bytes() == content


MOST_OPERATIONS = 60


@pytest.fixture
def lower_layer(tmp_path):
    """A folder whose content came with a container image: its folders cannot be renamed."""
    lower, merged = tmp_path / "lower", tmp_path / "merged"
    for number in range(MOST_OPERATIONS):
        (lower / f"run_{number}" / "deep").mkdir(parents=True)
        for name in ("run.json", "deep/one", "deep/two"):
            (lower / f"run_{number}" / name).write_text(name)
    folders = [tmp_path / name for name in ("upper", "work", "merged")]
    for folder in folders:
        folder.mkdir()
    layers = f"lowerdir={lower},upperdir={folders[0]},workdir={folders[1]},redirect_dir=off"
    words = ["mount", "-t", "overlay", "overlay", "-o", layers, str(merged)]
    if subprocess.run(words, check=False, capture_output=True).returncode:
        pytest.skip("an overlay file system cannot be mounted here")
    yield merged
    subprocess.run(["umount", "-l", str(merged)], check=True)


def test_a_folder_of_a_lower_layer_is_moved_and_removed(lower_layer):
    run, target = lower_layer / "run_0", lower_layer / "failed" / "run.attempt1"
    with pytest.raises(OSError, match="cross-device"):
        run.rename(lower_layer / "elsewhere")
    digest = storage.tree_digest(run)
    storage.move_dir(run, target)
    assert not run.exists()
    assert storage.tree_digest(target) == digest
    run.mkdir()  # its name is free again
    storage.remove_tree(run)
    assert not run.exists()


def killed_at(operation: int, source: Path, target: Path) -> bool:
    """Move a folder in a process that ends at its n-th operation; False if it has fewer."""
    left = operation

    def counted(call):
        def do(*args, **options):
            nonlocal left
            left -= 1
            if left < 0:
                os._exit(9)
            return call(*args, **options)

        return do

    if (child := os.fork()) == 0:
        for name in ("unlink", "rmdir", "symlink", "rename", "fsync", "mkdir", "write"):
            setattr(os, name, counted(getattr(os, name)))
        try:
            storage.move_dir(source, target)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


def test_a_move_out_of_a_lower_layer_is_whole_wherever_it_is_killed(lower_layer):
    whole = ["deep", "deep/one", "deep/two", "run.json"]

    def content(folder: Path) -> list[str]:
        return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))

    for number in range(MOST_OPERATIONS):
        run, target = lower_layer / f"run_{number}", lower_layer / f"moved_{number}"
        killed = killed_at(number, run, target)
        untouched = content(run) == whole
        storage.remove_leftovers(lower_layer)
        assert content(run) == (whole if untouched else [])
        assert untouched or content(target) == whole
        assert not list(lower_layer.glob(".tmp-*"))
        if not killed:
            break
    assert 10 < number < MOST_OPERATIONS - 1
    assert not untouched
