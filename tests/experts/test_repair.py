from __future__ import annotations

import pytest

from flowrl import durable
from flowrl.errors import ExpertCorruptError, ExpertMissingError, FileRefusedError
from flowrl.experts.merge import FrameRule
from flowrl.experts.repair import fall_back, fsck, rollback
from flowrl.experts.store import ExpertStore
from flowrl.layout import GraphLayout
from tests.experts.making import contents, make_expert, offer


@pytest.fixture
def store(tmp_path) -> ExpertStore:
    """Expert 0 in three versions of 1, 2 and 3 frames, expert 1 in one of 9."""
    store = ExpertStore(GraphLayout(tmp_path))
    for run_id, expert, acted in (("r1", 0, 1), ("r2", 0, 2), ("r3", 1, 9), ("r4", 0, 3)):
        folder = make_expert(tmp_path / "offers" / run_id, run_id)
        store.commit(run_id, [offer(folder, expert, acted)], policy=FrameRule())
    return store


def truncate(store: ExpertStore, index: int) -> None:
    version = store.manifest().experts[index]
    (store.path_of(version) / "arrays" / "d0").write_bytes(b"")


def test_a_whole_graph_has_no_damage(store):
    assert fsck(store) == ()


def test_damage_is_found_and_named(store):
    truncate(store, 0)
    durable.remove_tree(store.path_of(store.manifest().experts[1]))
    found = fsck(store)
    assert [damage.version.index for damage in found] == [0, 1]
    assert "sha256" in found[0].why
    assert "missing" in found[1].why


def test_a_truncated_expert_falls_back_to_its_previous_version(store):
    truncate(store, 0)
    assert fall_back(store, 0).frames == 2
    assert contents(store.layout) == {0: (2, "r2"), 1: (9, "r3")}
    assert store.manifest().generation == 5


def test_a_fall_back_skips_versions_that_are_damaged_too(store):
    truncate(store, 0)
    fall_back(store, 0)
    truncate(store, 0)
    assert fall_back(store, 0).frames == 1


def test_an_only_version_cannot_fall_back(store):
    truncate(store, 1)
    with pytest.raises(ExpertCorruptError, match=r"expert 1 .*train the skill again"):
        fall_back(store, 1)
    assert store.manifest().generation == 4


def test_an_unknown_expert_cannot_fall_back(store):
    with pytest.raises(ExpertMissingError, match="expert 7"):
        fall_back(store, 7)


def test_a_rollback_is_a_new_generation_with_old_experts_and_the_whole_ledger(store):
    rollback(store, 2)
    manifest = store.manifest()
    assert contents(store.layout) == {0: (2, "r2")}
    assert (manifest.generation, manifest.merged) == (5, ("r1", "r2", "r3", "r4"))
    rollback(store, 4)
    assert contents(store.layout) == {0: (3, "r4"), 1: (9, "r3")}


def test_a_rollback_survives_garbage_collection_and_recovery(store):
    rollback(store, 2)
    store.collect_garbage()
    store.recover()
    assert rollback(store, 4).experts[0].frames == 3


def test_a_rollback_to_a_damaged_version_changes_nothing(store):
    truncate(store, 1)
    with pytest.raises(ExpertCorruptError, match="expert 1"):
        rollback(store, 3)
    assert store.manifest().generation == 4


def test_a_rollback_to_an_unknown_generation_says_which_there_are(store):
    with pytest.raises(FileRefusedError, match="choose among 1 to 4"):
        rollback(store, 99)
