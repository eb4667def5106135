from __future__ import annotations

import pytest

from flowrl import notices, storage
from flowrl.errors import ConfigError, ExpertCorruptError
from flowrl.experts import manifest as manifests
from flowrl.experts import repair
from flowrl.experts.merge import frame_count
from flowrl.experts.repair import drop, rollback, usable
from flowrl.experts.store import ExpertStore
from flowrl.parallel.training_processor import recover_graph
from flowrl.paths import GraphPaths
from flowrl.runs import ExpertVersion
from tests.experts.making import candidate_in, content_of, contents, make_expert


@pytest.fixture
def store(tmp_path) -> ExpertStore:
    """Expert 0 in three versions of 1, 2 and 3 frames, expert 1 in one of 9."""
    store = ExpertStore(GraphPaths(tmp_path))
    for run_id, expert, acted in (("r1", 0, 1), ("r2", 0, 2), ("r3", 1, 9), ("r4", 0, 3)):
        folder = make_expert(tmp_path / "offers" / run_id, run_id)
        store.commit(run_id, [candidate_in(folder, expert, acted)], rule=frame_count)
    return store


def truncate(store: ExpertStore, index: int) -> None:
    version = store.manifest().experts[index]
    (store.path_of(version) / "arrays" / "d0").write_bytes(b"")


def fall_back(store: ExpertStore, index: int) -> ExpertVersion | None:
    return repair.fall_back(store, store.manifest().experts[index], "it is damaged")


def frames_after_fall_back(store: ExpertStore, index: int) -> int | None:
    found = fall_back(store, index)
    return None if found is None else found.frames


def test_what_a_lost_generation_brought_in_is_kept_as_long_as_it_would_have_been(store):
    kept = manifests.read_file(store.graph_paths.history / "1.json").experts[0]
    storage.remove_file(store.graph_paths.history / "1.json")
    assert store.collect_garbage() == ()
    assert content_of(store.verify(kept)) == "r1"
    assert store.collect_garbage(None) == ()


def test_a_usable_expert_is_left_alone(store):
    version = store.manifest().experts[0]
    assert usable(store, version) == version
    assert store.manifest().generation == 4
    assert notices.read(store.graph_paths) == {}


def test_a_damaged_expert_is_replaced_set_aside_and_told_of(store, caplog):
    broken = store.manifest().experts[0]
    truncate(store, 0)
    assert usable(store, broken).frames == 2
    aside = store.graph_paths.quarantine / store.path_of(broken).relative_to(store.graph_paths.root)
    assert (aside / "_METADATA").exists()
    assert "sha256" in aside.with_name(aside.name + ".why.txt").read_text()
    text = notices.read(store.graph_paths)["damage_expert_0"]
    assert "v000002-r2 (2 frames) counts again" in text
    assert "expert 0 (Skill 0) was damaged" in caplog.text


def test_an_expert_without_a_whole_version_is_refused_with_the_remedy(store):
    truncate(store, 1)
    broken = store.manifest().experts[1]
    for _ in range(2):
        with pytest.raises(ExpertCorruptError, match=r"no earlier version is whole: .*--repair"):
            usable(store, broken)
    assert store.manifest().generation == 4
    assert "--repair" in notices.read(store.graph_paths)["damage_expert_1"]
    drop(store, broken, "no version is whole")
    assert contents(store.graph_paths) == {0: (3, "r4")}


def test_a_fall_back_brings_back_nothing_that_was_rolled_back(store):
    rollback(store, 2)  # from 3 frames to 2
    truncate(store, 0)
    assert frames_after_fall_back(store, 0) == 1


def test_a_truncated_expert_falls_back_to_its_previous_version(store):
    truncate(store, 0)
    assert frames_after_fall_back(store, 0) == 2
    assert contents(store.graph_paths) == {0: (2, "r2"), 1: (9, "r3")}
    assert store.manifest().generation == 5


def test_a_fall_back_skips_versions_that_are_damaged_too(store):
    truncate(store, 0)
    fall_back(store, 0)
    truncate(store, 0)
    assert frames_after_fall_back(store, 0) == 1


def test_a_fall_back_that_was_killed_is_finished_by_the_next_start(store, monkeypatch):
    broken = store.manifest().experts[0]
    truncate(store, 0)

    def killed(change):
        raise KeyboardInterrupt

    monkeypatch.setattr(store, "amend", killed)
    with pytest.raises(KeyboardInterrupt):
        usable(store, broken)
    recover_graph(store.graph_paths)
    assert store.manifest().experts[0].frames == 2
    assert "counts again" in notices.read(store.graph_paths)["damage_expert_0"]
    assert (
        store.graph_paths.quarantine / store.path_of(broken).relative_to(store.graph_paths.root)
    ).exists()


def test_a_rollback_is_a_new_generation_with_old_experts_and_the_whole_ledger(store):
    rollback(store, 2)
    manifest = store.manifest()
    assert contents(store.graph_paths) == {0: (2, "r2")}
    assert (manifest.generation, manifest.merged) == (5, ("r1", "r2", "r3", "r4"))
    rollback(store, 4)
    assert contents(store.graph_paths) == {0: (3, "r4"), 1: (9, "r3")}


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


def test_a_generation_under_another_s_name_is_refused(store):
    storage.copy_file(store.graph_paths.history / "1.json", store.graph_paths.history / "2.json")
    with pytest.raises(ConfigError, match=r"no whole generation 2; choose among 1, 3$"):
        rollback(store, 2)
    assert store.manifest().generation == 4
