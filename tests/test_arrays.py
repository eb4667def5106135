"""The arrays of experts, read by a child."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from flowrl import arrays, checkpoints, durable
from flowrl.errors import BusyError, ExpertCorruptError
from tests.experts.making import SHAPES, content_digest, make_expert

SMALL = {"actor/kernel": (3, 2), "actor/bias": (2,)}


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    monkeypatch.setattr(arrays, "_known", {})


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
    return arrays.measured([(durable.tree_digest(f), f) for f in folders], wanted)


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
    monkeypatch.setattr(arrays, "READER", tmp_path / "no reader")
    assert measured(whole) == first
    with pytest.raises(ExpertCorruptError, match="the reader ended with 2"):
        measured(broken)


def reader_that(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "reader.py"
    path.write_text("\n".join(["import os, sys, time", *lines]))
    return path


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
