"""The arrays of experts, read by a child."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from flowrl.errors import BusyError, ExpertCorruptError
from flowrl.experts import array_check, checkpoint
from flowrl.experts.array_check import ArrayReport
from tests.experts.making import SHAPES, all_files, content_digest, is_whole, make_expert
from tests.waiting import until

SMALL = {"actor/kernel": (3, 2), "actor/bias": (2,)}


@pytest.fixture(autouse=True)
def no_reader_yet(monkeypatch):
    monkeypatch.setattr(array_check, "STARTED", [])


def saved(folder: Path, **leaves: np.ndarray) -> Path:
    tree = {
        "actor": {
            "kernel": np.arange(6, dtype=np.float32).reshape(3, 2),
            "bias": np.zeros(2, np.float32),
            **leaves,
        }
    }
    checkpoint.save_expert(folder, tree)
    return folder


def read(*folders: Path, expected=SMALL) -> tuple[ArrayReport, ...]:
    return array_check.read_arrays(folders, expected)


def test_what_orbax_wrote_is_read_leaf_by_leaf_with_the_digest_that_the_trainer_makes(tmp_path):
    folder = saved(tmp_path / "expert")
    (found,) = read(folder)
    tree = checkpoint.load_expert(folder, checkpoint.like_of(SMALL))
    assert found.content == checkpoint.array_digest(tree)
    assert (found.differences, found.unreadable) == ((), "")


def test_a_stand_in_expert_is_a_real_checkpoint(tmp_path):
    folder = make_expert(tmp_path / "expert", "some content")
    tree = checkpoint.load_expert(folder, checkpoint.like_of(SHAPES))
    (found,) = read(folder, expected=SHAPES)
    assert found.content == checkpoint.array_digest(tree) == content_digest(folder)
    assert is_whole(folder)


def test_a_stand_in_with_a_byte_or_a_file_that_is_other_is_not_whole(tmp_path):
    folder = make_expert(tmp_path / "expert", "some content")
    for name, content in all_files(folder).items():
        if name != "arrays/d0":
            (folder / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
            assert not is_whole(folder), name
        (folder / name).unlink()
        assert not is_whole(folder), name
        (folder / name).write_bytes(content)
        assert is_whole(folder)
    (folder / "more").touch()
    assert not is_whole(folder)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf], ids=str)
def test_leaves_that_are_not_finite_are_named(tmp_path, value):
    whole = saved(tmp_path / "whole")
    broken = saved(tmp_path / "broken", bias=np.array([0.0, value], np.float32))
    problem = ("actor/bias", "finite", "NaN or infinite")
    assert [found.differences for found in read(whole, broken)] == [(), (problem,)]


@pytest.mark.parametrize(
    ("leaf", "difference"),
    [
        (np.zeros(3, np.float32), ("actor/bias", "(2,)", "(3,)")),
        (np.zeros(2, np.float16), ("actor/bias of dtype", "<f4", "<f2")),
        (np.zeros(2, np.int32), ("actor/bias of dtype", "<f4", "<i4")),
    ],
    ids=["shape", "float16", "integers"],
)
def test_arrays_of_another_form_are_reported_and_not_loaded(tmp_path, leaf, difference):
    (found,) = read(saved(tmp_path / "expert", bias=leaf))
    assert found == ArrayReport(differences=(difference,))


def test_leaves_that_are_missing_or_unexpected_are_reported(tmp_path):
    (found,) = read(saved(tmp_path / "expert"), expected={"actor/bias": (2,), "critic/bias": (1,)})
    assert found.differences == (
        ("actor/kernel", "absent", "(3, 2)"),
        ("critic/bias", "(1,)", "absent"),
    )


def without_manifest(folder: Path) -> None:
    (folder / "manifest.ocdbt").unlink()


def without_description(folder: Path) -> None:
    (folder / "_METADATA").unlink()


def with_another_description(folder: Path) -> None:
    path = folder / "_METADATA"
    facts = json.loads(path.read_text())
    facts["tree_metadata"].popitem()
    path.write_text(json.dumps(facts))


def with_zeros_for_data(folder: Path) -> None:
    for path in folder.glob("**/d/*"):
        path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.parametrize(
    "damage", [without_manifest, without_description, with_another_description, with_zeros_for_data]
)
def test_what_cannot_be_read_is_said_and_harms_no_other(tmp_path, damage):
    broken, whole = saved(tmp_path / "broken"), saved(tmp_path / "whole")
    damage(broken)
    first, second = read(broken, whole)
    assert first.unreadable
    assert first.content == ""
    assert second.content


def test_an_array_in_chunks_that_are_larger_than_itself_is_not_loaded(tmp_path):
    folder = tmp_path / "expert"
    for name, shape in SMALL.items():
        home = folder / name.replace("/", ".")
        home.mkdir(parents=True)
        form = {"zarr_format": 2, "shape": shape, "chunks": [10**9] * len(shape), "order": "C"}
        form |= {"dtype": "<f4", "compressor": None, "filters": None, "fill_value": None}
        (home / ".zarray").write_text(json.dumps(form))
    keys = [{"key_metadata": [{"key": k} for k in name.split("/")]} for name in SMALL]
    described = {str(place): leaf for place, leaf in enumerate(keys)}
    (folder / "_METADATA").write_text(json.dumps({"tree_metadata": described}))
    (found,) = read(folder)
    assert "chunks of [1000000000" in found.unreadable


def reader_that(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "reader.py"
    ready = "print('ready', flush=True)"
    path.write_text("\n".join(["import json, os, sys, time", ready, *lines]))
    return path


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_reader_that_was_started_ahead_serves_one_check_and_is_replaced_if_killed(tmp_path):
    folder = saved(tmp_path / "expert")
    array_check.start_reader()
    array_check.start_reader()
    (child,) = array_check.STARTED
    first = read(folder)
    assert child.returncode == 0
    assert array_check.STARTED == []
    array_check.start_reader()
    array_check.STARTED[0].kill()
    array_check.STARTED[0].wait()
    assert read(folder) == first


@pytest.mark.parametrize("failing", ["print('[{')", "sys.exit('no such array')"])
def test_a_reader_that_fails_refuses_the_files(tmp_path, monkeypatch, failing):
    monkeypatch.setattr(array_check, "READER", reader_that(tmp_path, failing))
    with pytest.raises(ExpertCorruptError, match="reader ended with"):
        read(saved(tmp_path / "expert"))


def test_long_error_messages_do_not_block_the_reader(tmp_path, monkeypatch):
    complains = "sys.stderr.write('no ' * 10**6); print('[]')"
    monkeypatch.setattr(array_check, "READER", reader_that(tmp_path, complains))
    assert read(saved(tmp_path / "expert")) == ()


STARTS_AND_WAITS = """
import fcntl, os, sys, time
from flowrl.experts import array_check
lock = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
os.set_inheritable(lock, True)
fcntl.flock(lock, fcntl.LOCK_EX)
array_check.start_reader()
print(array_check.STARTED[0].pid, flush=True)
time.sleep(60)
"""


def list_open_locks(pid: int) -> list[str]:
    names = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # the reader has closed it meanwhile
            names.append(os.readlink(path))  # noqa: PTH115
    return [name for name in names if name.endswith("lock")]


def test_a_reader_ends_with_the_process_that_started_it_and_inherits_no_lock(tmp_path):
    words = [STARTS_AND_WAITS, str(tmp_path / "lock")]
    asking = subprocess.Popen([sys.executable, "-c", *words], stdout=subprocess.PIPE, text=True)
    assert asking.stdout is not None
    pid = int(asking.stdout.readline())
    assert not list_open_locks(pid)
    assert os.getsid(pid) == pid
    asking.kill()
    asking.communicate()
    until(lambda: not lives(pid), seconds=30.0)


FORKS = """
import os, sys
from pathlib import Path
from flowrl.experts import array_check
array_check.start_reader()
if not (child := os.fork()):
    array_check.read_arrays([Path(sys.argv[1])], {})
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert array_check.STARTED[0].poll() is None
"""


def test_a_forked_process_uses_a_reader_of_its_own(tmp_path):
    folder = str(saved(tmp_path / "expert"))
    assert subprocess.run([sys.executable, "-c", FORKS, folder], check=False).returncode == 0


def test_a_reader_that_is_killed_or_hangs_is_tried_again_later(tmp_path, monkeypatch):
    folder = saved(tmp_path / "expert")
    for number in (signal.SIGKILL, signal.SIGALRM):
        killed = reader_that(tmp_path, f"os.kill(os.getpid(), {number:d})")
        monkeypatch.setattr(array_check, "READER", killed)
        with pytest.raises(BusyError, match=f"ended with -{number:d}"):
            read(folder)
    monkeypatch.setattr(array_check, "_SECONDS", 0.2)
    monkeypatch.setattr(array_check, "READER", reader_that(tmp_path, "time.sleep(60)"))
    with pytest.raises(BusyError, match="within"):
        read(folder)


@pytest.mark.parametrize("failing", ["import no_such_library", "os.abort()", "sys.exit(0)"])
def test_a_reader_that_fails_before_it_looks_at_a_file_refuses_none(tmp_path, monkeypatch, failing):
    reader = tmp_path / "reader.py"
    reader.write_text(f"import os, sys\n{failing}")
    monkeypatch.setattr(array_check, "READER", reader)
    with pytest.raises(BusyError, match="cannot be read now"):
        read(saved(tmp_path / "expert"))


def test_a_reader_that_lacks_threads_refuses_no_files(tmp_path, monkeypatch):
    """As C++ says it, which aborts."""
    lacks = f"sys.stderr.write('  what():  {os.strerror(errno.EAGAIN)}'); sys.stderr.flush()"
    monkeypatch.setattr(array_check, "READER", reader_that(tmp_path, lacks, "os.abort()"))
    with pytest.raises(BusyError, match="Resource temporarily unavailable"):
        read(saved(tmp_path / "expert"))


READS_UNDER_A_HARD_LIMIT = """
import json, resource, sys
from pathlib import Path
from flowrl.errors import BusyError
from flowrl.experts import array_check
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[2]), int(sys.argv[2])))
try:
    (found,) = array_check.read_arrays([Path(sys.argv[1])], json.loads(sys.argv[3]))
    print(found.content)
except BusyError:
    print("later")
"""
LARGE = {"actor/kernel": (4096, 4096)}  # 64 MiB


@pytest.mark.parametrize(("megabytes", "enough"), [(6000, True), (400, False), (100, False)])
def test_a_hard_limit_of_memory_refuses_no_files(tmp_path, megabytes, enough):
    """As `ulimit -v` sets it on many login nodes."""
    folder = tmp_path / "expert"
    checkpoint.save_expert(folder, {"actor": {"kernel": np.zeros((4096, 4096), np.float32)}})
    (found,) = read(folder, expected=LARGE)
    words = [sys.executable, "-c", READS_UNDER_A_HARD_LIMIT, str(folder), str(megabytes * 2**20)]
    done = subprocess.run([*words, json.dumps(LARGE)], check=False, capture_output=True, text=True)
    assert done.stdout.strip() == (found.content if enough else "later"), done.stderr


def test_a_reader_that_crashes_on_the_files_refuses_them(tmp_path, monkeypatch):
    folder = saved(tmp_path / "expert")
    monkeypatch.setattr(array_check, "READER", reader_that(tmp_path, "os.abort()"))
    with pytest.raises(ExpertCorruptError, match=r"cannot be read \(the reader ended with -6"):
        read(folder)


def test_the_reader_has_a_bound_on_its_memory(tmp_path, monkeypatch):
    """A library that lacks memory ends the reader or makes it report the folder as unreadable."""
    monkeypatch.setattr(array_check, "_MEMORY_BYTES", 10 * 2**20)
    try:
        (found,) = read(saved(tmp_path / "expert"))
    except (ExpertCorruptError, BusyError):
        return
    assert found.unreadable


def test_the_checking_process_loads_no_array_library_and_has_one_thread(tmp_path):
    folder = make_expert(tmp_path / "expert", "x")
    code = (
        "import sys; from pathlib import Path; from flowrl.experts import array_check\n"
        f"(found,) = array_check.read_arrays([Path({str(folder)!r})], {SHAPES!r})\n"
        "assert found.content\n"
        "assert not {'numpy', 'tensorstore', 'jax'} & set(sys.modules)\n"
        "assert len(__import__('os').listdir('/proc/self/task')) == 1\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=dict(os.environ), check=False)
    assert done.returncode == 0
