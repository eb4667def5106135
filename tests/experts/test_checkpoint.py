from __future__ import annotations

import errno
import shutil

import numpy as np
import pytest

from flowrl import storage
from flowrl.errors import ExpertCorruptError, ExpertMissingError, ExpertShapeError
from flowrl.experts import checkpoint
from flowrl.runs import expert_shapes
from tests.experts import making

SHAPES = expert_shapes(9, 4, 6)
# Orbax's own loop is closed when it meets damaged files, and complains when it is collected.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def random_expert(seed: int) -> dict:
    return making.random_expert(seed, SHAPES)


def same_bits(one, other) -> bool:
    left, right = checkpoint.named_leaves(one), checkpoint.named_leaves(other)
    return left.keys() == right.keys() and all(
        left[path].dtype == right[path].dtype and left[path].tobytes() == right[path].tobytes()
        for path in left
    )


def test_shapes_are_named_by_the_path_of_their_leaf():
    assert checkpoint.shapes_of(random_expert(0)) == SHAPES


def test_a_saved_folder_keeps_its_digest_when_it_is_copied(tmp_path):
    checkpoint.save_expert(tmp_path / "one", random_expert(0))
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    assert storage.tree_digest(tmp_path / "one") == storage.tree_digest(tmp_path / "two")
    found = checkpoint.load_expert(tmp_path / "two", checkpoint.like_of(SHAPES))
    assert same_bits(found, random_expert(0))


def test_the_digest_of_arrays_outlives_saving_and_that_of_files_does_not(tmp_path):
    for name in ("one", "two"):
        checkpoint.save_expert(tmp_path / name, random_expert(0))
    found = checkpoint.load_expert(tmp_path / "two", checkpoint.like_of(SHAPES))
    assert checkpoint.array_digest(found) == checkpoint.array_digest(random_expert(0))
    assert storage.tree_digest(tmp_path / "one") != storage.tree_digest(tmp_path / "two")


@pytest.mark.parametrize(
    "other",
    [
        {"a": np.zeros((2, 3), np.float32), "b": np.array([0.0, -0.0], np.float32)},
        {"a": np.zeros((3, 2), np.float32), "b": np.zeros(2, np.float32)},
        {"a": np.zeros((2, 3), np.int32), "b": np.zeros(2, np.float32)},
        {"b": np.zeros((2, 3), np.float32), "a": np.zeros(2, np.float32)},
        {"a": {"b": np.zeros((2, 3), np.float32)}, "b": np.zeros(2, np.float32)},
    ],
    ids=["a bit", "a shape", "a dtype", "names swapped", "a name"],
)
def test_arrays_that_differ_have_another_digest(other):
    one = {"a": np.zeros((2, 3), np.float32), "b": np.zeros(2, np.float32)}
    assert checkpoint.array_digest(other) != checkpoint.array_digest(one)


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        (expert_shapes(9, 4, 8), ["actor/dense_0/bias", "(6,)", "(8,)", "--layer_size"]),
        (
            {p: s for p, s in SHAPES.items() if p != "critic/dense_3/bias"},
            ["critic/dense_3/bias", "no such leaf"],
        ),
        ({**SHAPES, "critic/extra": (2, 2)}, ["has no critic/extra", "(2, 2)"]),
    ],
    ids=["another width", "a leaf too many", "a leaf too few"],
)
def test_an_expert_of_another_form_is_refused_by_name(tmp_path, shapes, words):
    checkpoint.save_expert(tmp_path / "expert_4", random_expert(4))
    with pytest.raises(ExpertShapeError) as caught:
        checkpoint.load_expert(tmp_path / "expert_4", checkpoint.like_of(shapes))
    for word in [*words, "expert_4"]:
        assert word in str(caught.value)


def test_an_expert_of_another_dtype_is_refused(tmp_path):
    checkpoint.save_expert(tmp_path / "e", random_expert(0))
    with pytest.raises(ExpertShapeError, match="float64"):
        checkpoint.load_expert(tmp_path / "e", checkpoint.like_of(SHAPES, np.float64))


def test_a_missing_expert_is_told_from_a_broken_one(tmp_path):
    with pytest.raises(ExpertMissingError, match="does not exist"):
        checkpoint.load_expert(tmp_path / "none", checkpoint.like_of(SHAPES))


@pytest.mark.parametrize("victim", ["_METADATA", "manifest.ocdbt", "d"])
def test_an_expert_with_damaged_files_is_refused(tmp_path, victim):
    checkpoint.save_expert(tmp_path / "e", random_expert(0))
    path = tmp_path / "e" / victim
    for file in [path] if path.is_file() else list(path.iterdir()):
        file.write_bytes(file.read_bytes()[:7])
    with pytest.raises(ExpertCorruptError, match="cannot be read"):
        checkpoint.load_expert(tmp_path / "e", checkpoint.like_of(SHAPES))


def test_what_a_killed_save_left_is_cleared_by_the_next(tmp_path):
    (tmp_path / ".tmp-e.orbax-checkpoint-tmp").mkdir()
    (tmp_path / ".tmp-e").mkdir()
    checkpoint.save_expert(tmp_path / "e", random_expert(0))
    assert [entry.name for entry in tmp_path.iterdir()] == ["e"]


def test_a_save_that_fails_publishes_nothing(tmp_path, monkeypatch):
    def refuse(root):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(storage, "flush", refuse)
    with pytest.raises(OSError, match="No space"):
        checkpoint.save_expert(tmp_path / "e", random_expert(0))
    assert not (tmp_path / "e").exists()


def test_a_resumable_state_replaces_the_older_one(tmp_path):
    like = {"frames": np.int64(0), "params": random_expert(0)}
    for frames in (2**40, 2**40 + 1, 2):  # a second phase counts from its own beginning
        checkpoint.save_resume(tmp_path / "resume", {**like, "frames": np.int64(frames)})
        assert checkpoint.load_resume(tmp_path / "resume", like)["frames"] == frames
    assert len(list((tmp_path / "resume").iterdir())) == 1


@pytest.mark.parametrize("name", ["007", "\u0667", "\u00b2", "7.tmp"])
def test_a_name_that_is_no_number_of_ours_is_no_resumable_state(tmp_path, name):
    (tmp_path / name).mkdir()
    assert not checkpoint.has_resume(tmp_path)


def test_without_a_resumable_state_there_is_nothing_to_load(tmp_path):
    assert not checkpoint.has_resume(tmp_path / "resume")
    with pytest.raises(ExpertMissingError, match="--no_resume"):
        checkpoint.load_resume(tmp_path / "resume", random_expert(0))


def test_a_full_disk_is_an_error_of_the_disk(tmp_path, monkeypatch):
    def save(*_):
        raise ValueError("RESOURCE_EXHAUSTED: Failed to write: No space left on device [28]")

    monkeypatch.setattr("orbax.checkpoint.StandardCheckpointer.save", save)
    with pytest.raises(OSError, match="No space left") as found:
        checkpoint.save_expert(tmp_path / "0", {"a": np.zeros(3)})
    assert found.value.errno == errno.ENOSPC
