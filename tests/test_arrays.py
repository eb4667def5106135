"""The arrays of experts, read by a child."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from flowrl import arrays, checkpoints, storage
from flowrl.arrays import standing
from flowrl.arrays.standing import StandingReader
from flowrl.errors import BusyError, ExpertCorruptError
from tests.experts.making import SHAPES, content_digest, make_expert

SMALL = {"actor/kernel": (3, 2), "actor/bias": (2,)}


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    monkeypatch.setattr(arrays, "_known", {})
    reader = StandingReader(lambda: arrays.READER)
    monkeypatch.setattr(arrays, "_reader", reader)
    yield
    reader.end()


def saved(folder: Path, **leaves: np.ndarray) -> Path:
    tree = {
        "actor": {
            "kernel": np.arange(6, dtype=np.float32).reshape(3, 2),
            "bias": np.zeros(2, np.float32),
            **leaves,
        }
    }
    checkpoints.save_expert(folder, tree)
    return folder


def measured(*folders: Path, wanted=SMALL) -> tuple[arrays.Arrays, ...]:
    return arrays.measured([(storage.tree_digest(f), f) for f in folders], wanted)


def test_what_orbax_wrote_is_read_leaf_by_leaf_with_the_digest_that_the_trainer_makes(tmp_path):
    folder = saved(tmp_path / "expert")
    (found,) = measured(folder)
    tree = checkpoints.load_expert(folder, checkpoints.like_of(SMALL))
    assert found.content == checkpoints.array_digest(tree)
    assert (dict(found.shapes), found.not_finite, found.unreadable) == (SMALL, (), "")
    assert set(found.dtypes.values()) == {arrays.FLOAT}


def test_a_stand_in_expert_is_a_real_checkpoint(tmp_path):
    folder = make_expert(tmp_path / "expert", "some content")
    tree = checkpoints.load_expert(folder, checkpoints.like_of(SHAPES))
    (found,) = measured(folder, wanted=SHAPES)
    assert found.content == checkpoints.array_digest(tree) == content_digest(folder)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf], ids=str)
def test_leaves_that_are_not_finite_are_named(tmp_path, value):
    whole = saved(tmp_path / "whole")
    broken = saved(tmp_path / "broken", bias=np.array([0.0, value], np.float32))
    assert [found.not_finite for found in measured(whole, broken)] == [(), ("actor/bias",)]


@pytest.mark.parametrize(
    ("leaf", "form"),
    [
        (np.zeros(3, np.float32), ((3,), "<f4")),
        (np.zeros(2, np.float16), ((2,), "<f2")),
        (np.zeros(2, np.int32), ((2,), "<i4")),
    ],
    ids=["shape", "float16", "integers"],
)
def test_arrays_of_another_form_are_told_and_not_loaded(tmp_path, leaf, form):
    (found,) = measured(saved(tmp_path / "expert", bias=leaf))
    assert (found.shapes["actor/bias"], found.dtypes["actor/bias"]) == form
    assert (found.content, found.unreadable) == ("", "")


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
    "damage",
    [without_manifest, without_description, with_another_description, with_zeros_for_data],
)
def test_what_cannot_be_read_is_said_and_harms_no_other(tmp_path, damage):
    broken, whole = saved(tmp_path / "broken"), saved(tmp_path / "whole")
    damage(broken)
    first, second = measured(broken, whole)
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
    (found,) = measured(folder)
    assert "chunks of [1000000000" in found.unreadable


def test_what_was_read_once_is_known_and_what_was_not_readable_is_not(tmp_path, monkeypatch):
    broken, whole = saved(tmp_path / "broken"), saved(tmp_path / "whole")
    without_manifest(broken)
    first = measured(whole)
    measured(broken)
    arrays._reader.end()
    monkeypatch.setattr(arrays, "READER", tmp_path / "no reader")
    assert measured(whole) == first
    with pytest.raises(ExpertCorruptError, match="the reader ended with 2"):
        measured(broken)


def reader_that(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "reader.py"
    path.write_text("\n".join(["import json, os, sys, time", *lines]))
    return path


def reader_pid() -> int:
    child = arrays._reader._child
    assert child is not None
    return child.pid


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until(holds) -> None:
    deadline = time.monotonic() + 30.0
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_one_reader_answers_order_after_order(tmp_path):
    measured(saved(tmp_path / "first"))
    pid = reader_pid()
    measured(saved(tmp_path / "second", bias=np.ones(2, np.float32)))
    assert reader_pid() == pid


def test_a_folder_whose_files_are_others_now_is_read_anew(tmp_path):
    folder = tmp_path / "expert"
    contents = set()
    for word in ("first", "second"):
        make_expert(folder, word)
        (found,) = measured(folder, wanted=SHAPES)
        assert found.content == content_digest(folder)
        contents.add(found.content)
        shutil.rmtree(folder)
    assert len(contents) == 2


def test_a_reader_that_was_killed_while_it_was_idle_is_replaced(tmp_path):
    measured(saved(tmp_path / "first"))
    pid = reader_pid()
    os.kill(pid, signal.SIGKILL)
    (found,) = measured(saved(tmp_path / "second", bias=np.ones(2, np.float32)))
    assert found.content
    assert reader_pid() != pid


def test_what_a_reader_could_not_read_is_the_last_thing_it_meets(tmp_path):
    broken, whole = saved(tmp_path / "broken"), saved(tmp_path / "whole")
    without_manifest(broken)
    arrays.make_ready()
    pid = reader_pid()
    measured(broken)
    assert not lives(pid)
    (found,) = measured(whole)
    assert found.content


ANSWERS = """
for line in sys.stdin:
    with open(__file__ + ".orders", "a") as file:
        file.write(f"{os.getpid()}\\n")
    order = json.loads(line)
    facts = {"shapes": {}, "dtypes": {}, "content": "x", "not_finite": [], "unreadable": ""}
"""
SAYS_IT = "    print(json.dumps([facts for _ in order['folders']]), flush=True)"


def test_an_order_that_ends_a_used_reader_is_tried_by_a_fresh_one(tmp_path, monkeypatch):
    first, second = saved(tmp_path / "1"), saved(tmp_path / "2", bias=np.ones(2, np.float32))
    script = reader_that(tmp_path, ANSWERS, SAYS_IT, "    sys.stdin.readline(), os.abort()")
    monkeypatch.setattr(arrays, "READER", script)
    measured(first)
    (found,) = measured(second)
    assert found.content == "x"
    pids = Path(f"{script}.orders").read_text().split()
    assert len(pids) == len(set(pids)) == 2


def test_an_order_that_ends_a_fresh_reader_too_is_blamed_after_one_more_try(tmp_path, monkeypatch):
    first, second = saved(tmp_path / "1"), saved(tmp_path / "2", bias=np.ones(2, np.float32))
    crashes = "    if '/2' in order['folders'][0]: os._exit(3)"
    script = reader_that(tmp_path, ANSWERS, crashes, SAYS_IT)
    monkeypatch.setattr(arrays, "READER", script)
    measured(first)
    with pytest.raises(ExpertCorruptError, match="ended with 3"):
        measured(second)
    assert len(Path(f"{script}.orders").read_text().split()) == 3
    assert measured(first)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("    while True: sys.stdout.write('x' * 9999)", "over 1000000 bytes"),
        ("    print('[]', flush=True)", "told of 0, not of 1"),
        ("    print('[{}]', flush=True)", "malformed: KeyError"),
        ("    print('[' * 9999, flush=True)", "malformed"),
        ("    sys.stdout.write('[]\\n[]\\n'); sys.stdout.flush()", "more than it was asked"),
    ],
    ids=["endless", "too few", "empty", "nested", "twice"],
)
def test_an_answer_that_is_none_refuses_the_files(tmp_path, monkeypatch, line, why):
    monkeypatch.setattr(standing, "ANSWER_BYTES", 10**6)
    monkeypatch.setattr(arrays, "READER", reader_that(tmp_path, ANSWERS, line))
    with pytest.raises(ExpertCorruptError, match=why):
        measured(saved(tmp_path / "expert"))
    assert arrays._reader._child is None


def test_a_reader_that_complains_at_length_is_heard_all_the_same(tmp_path, monkeypatch):
    complains = "    sys.stderr.write('no ' * 10**6)"
    monkeypatch.setattr(arrays, "READER", reader_that(tmp_path, ANSWERS, complains, SAYS_IT))
    (found,) = measured(saved(tmp_path / "expert"))
    assert found.content == "x"


ASKS_AND_WAITS = """
import fcntl, os, sys, time
from pathlib import Path
from flowrl import arrays
lock = os.open(sys.argv[2], os.O_RDWR | os.O_CREAT)
os.set_inheritable(lock, True)
fcntl.flock(lock, fcntl.LOCK_EX)
arrays.make_ready()
arrays.measured([("x", Path(sys.argv[1]))], {})
print(arrays._reader._child.pid, flush=True)
time.sleep(60)
"""


def test_a_reader_outlives_nobody_and_inherits_no_lock(tmp_path):
    words = [ASKS_AND_WAITS, str(saved(tmp_path / "expert")), str(tmp_path / "lock")]
    asking = subprocess.Popen([sys.executable, "-c", *words], stdout=subprocess.PIPE, text=True)
    assert asking.stdout is not None
    pid = int(asking.stdout.readline())
    held = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]  # noqa: PTH115
    assert not [name for name in held if name.endswith("lock")]
    assert os.getsid(pid) == pid
    asking.kill()
    asking.communicate()
    until(lambda: not lives(pid))


FORKS = """
import os, sys
from pathlib import Path
from flowrl import arrays
def pid_once_asked(word):
    arrays.measured([(word, Path(sys.argv[1]))], {})
    return arrays._reader._child.pid
pid = pid_once_asked("x")
if not (child := os.fork()):
    other = pid_once_asked("y")
    arrays._reader.end()
    os._exit(0 if other != pid else 2)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert pid_once_asked("z") == pid
"""


def test_a_fork_of_whoever_asks_has_a_reader_of_its_own(tmp_path):
    folder = str(saved(tmp_path / "expert"))
    assert subprocess.run([sys.executable, "-c", FORKS, folder], check=False).returncode == 0


def test_a_reader_that_is_killed_or_hangs_is_asked_again_later(tmp_path, monkeypatch):
    folder = saved(tmp_path / "expert")
    monkeypatch.setattr(arrays, "READER", reader_that(tmp_path, "os.kill(os.getpid(), 9)"))
    with pytest.raises(BusyError, match="signal 9"):
        measured(folder)
    monkeypatch.setattr(arrays, "_SECONDS", 0.2)
    monkeypatch.setattr(arrays, "READER", reader_that(tmp_path, "time.sleep(60)"))
    with pytest.raises(BusyError, match="within"):
        measured(folder)


def test_a_reader_that_crashes_on_the_files_refuses_them(tmp_path, monkeypatch):
    folder = saved(tmp_path / "expert")
    monkeypatch.setattr(arrays, "READER", reader_that(tmp_path, "os.abort()"))
    with pytest.raises(ExpertCorruptError, match=r"cannot be read \(the reader ended with -6"):
        measured(folder)


def refuse_unreadable(found: tuple[arrays.Arrays, ...]) -> None:
    """What takes too much memory ends the reader or is reported by it, as the library likes."""
    if all(one.unreadable for one in found):
        raise ExpertCorruptError("cannot be read")


def test_the_reader_has_a_bound_on_its_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(arrays, "_MEMORY_BYTES", 10 * 2**20)
    with pytest.raises(ExpertCorruptError, match="cannot be read"):
        refuse_unreadable(measured(saved(tmp_path / "expert")))


def test_whoever_asks_stays_free_of_arrays(tmp_path):
    folder = make_expert(tmp_path / "expert", "x")
    code = (
        "import sys; from pathlib import Path; from flowrl import arrays\n"
        f"(found,) = arrays.measured([('x', Path({str(folder)!r}))], {SHAPES!r})\n"
        "assert found.content\n"
        "assert not {'numpy', 'tensorstore', 'jax'} & set(sys.modules)\n"
        "assert len(__import__('os').listdir('/proc/self/task')) == 1\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=dict(os.environ), check=False)
    assert done.returncode == 0


def test_what_is_done_while_arrays_are_read_comes_first(tmp_path):
    def refuse() -> None:
        raise LookupError

    both = [("lie", tmp_path / "missing"), ("other", tmp_path / "missing")]
    with pytest.raises(LookupError):
        arrays.measured(both, {}, meanwhile=refuse)
    with pytest.raises(LookupError):
        arrays.measured([], {}, meanwhile=refuse)
    assert not any(sha256 == "lie" for sha256, _ in arrays._known)
    (found,) = arrays.measured([("lie", tmp_path / "missing")], {})
    assert found.unreadable, "an answer to the order before is none to this one"
