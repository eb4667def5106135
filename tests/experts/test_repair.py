from __future__ import annotations

import pytest

from flowrl import notices, storage
from flowrl.errors import ExpertCorruptError, ExpertMissingError, FileRefusedError
from flowrl.experts import manifest as manifests
from flowrl.experts.merge import frame_count
from flowrl.experts.repair import CHECKS, drop, fall_back, rollback, usable
from flowrl.experts.store import ExpertStore
from flowrl.paths import GraphPaths
from tests.experts.making import candidate_in, content_of, contents, make_expert
from tests.sealing import rewrite


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


def found(store: ExpertStore, pinned=()) -> list[tuple[str, str]]:
    return [
        (finding.severity, finding.thing) for check in CHECKS for finding in check(store, pinned)
    ]


def test_a_whole_store_has_nothing_to_be_said(store):
    assert found(store) == []


def test_damage_is_found_and_named(store):
    truncate(store, 0)
    storage.remove_tree(store.path_of(store.manifest().experts[1]))
    (first, why), (second, lost), *rest = found(store)
    assert (first, second, rest) == ("error", "error", [])
    assert "expert 0 (Skill 0)" in why
    assert "sha256" in why
    assert "missing" in lost


def test_a_damaged_spare_is_a_warning(store):
    spare = manifests.read_file(store.layout.history / "1.json").experts[0]
    (store.path_of(spare) / "_METADATA").unlink()
    ((severity, thing),) = found(store)
    assert severity == "warning"
    assert "nothing uses it now" in thing


def test_a_manifest_whose_sums_or_ledger_are_wrong_is_found(store):
    def spoil(facts):
        facts["experts"][0]["frames"] = 7
        facts["merged"].append("r1")

    for path in (store.layout.manifest, store.layout.history / "4.json"):
        rewrite(path, spoil)
    things = "\n".join(thing for _, thing in found(store))
    assert "run r1 is in the ledger of generation 4 twice" in things
    assert "expert 0 (Skill 0) has 7 frames, its lineage sums up to 3" in things


def test_a_version_that_nobody_names_is_found_unless_a_live_run_pins_it(store):
    make_expert(store.layout.expert_version(0, "Skill 0", "v000009-dead"), "left")
    (store.layout.expert_folder(0, "Skill 0") / "notes").mkdir()
    assert [severity for severity, _ in found(store)] == ["warning", "note"]
    assert [severity for severity, _ in found(store, {(0, "v000009-dead")})] == ["note"]
    assert [severity for severity, _ in found(store, None)] == ["note"]


def test_what_a_lost_generation_brought_in_is_kept_as_long_as_it_would_have_been(store):
    kept = manifests.read_file(store.layout.history / "1.json").experts[0]
    storage.remove_file(store.layout.history / "1.json")
    assert store.collect_garbage() == ()
    assert content_of(store.verify(kept)) == "r1"
    assert store.collect_garbage(None) == ()


def test_a_usable_expert_is_left_alone(store):
    version = store.manifest().experts[0]
    assert usable(store, version) == version
    assert store.manifest().generation == 4
    assert notices.read(store.layout) == {}


def test_a_damaged_expert_is_replaced_set_aside_and_told_of(store, caplog):
    broken = store.manifest().experts[0]
    truncate(store, 0)
    assert usable(store, broken).frames == 2
    aside = store.layout.quarantine / store.path_of(broken).relative_to(store.layout.root)
    assert (aside / "_METADATA").exists()
    assert "sha256" in aside.with_name(aside.name + ".why.txt").read_text()
    text = notices.read(store.layout)["damage_expert_0"]
    assert "v000002-r2 (2 frames) counts again" in text
    assert "expert 0 (Skill 0) was damaged" in caplog.text


def test_an_expert_without_a_whole_version_is_refused_with_the_remedy(store):
    truncate(store, 1)
    broken = store.manifest().experts[1]
    for _ in range(2):
        with pytest.raises(ExpertCorruptError, match=r"No earlier version is whole: .*--repair"):
            usable(store, broken)
    assert store.manifest().generation == 4
    assert "--repair" in notices.read(store.layout)["damage_expert_1"]
    drop(store, 1, "no version is whole")
    assert contents(store.layout) == {0: (3, "r4")}


def test_a_fall_back_brings_back_nothing_that_was_rolled_back(store):
    rollback(store, 2)  # from 3 frames to 2
    truncate(store, 0)
    assert fall_back(store, 0).frames == 1


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


def test_a_rollback_to_what_counts_already_uses_no_room_of_the_history(store):
    rollback(store, 1)
    for _ in range(2):
        assert rollback(store, 1).generation == 5
    assert manifests.generations(store.layout) == (1, 2, 3, 4, 5)


def test_a_generation_under_another_s_name_is_refused(store):
    storage.copy_file(store.layout.history / "1.json", store.layout.history / "2.json")
    with pytest.raises(FileRefusedError, match="is of generation 1"):
        rollback(store, 2)
    assert store.manifest().generation == 4


def test_a_rollback_to_an_unknown_generation_says_which_there_are(store):
    with pytest.raises(FileRefusedError, match="choose among 1 to 4"):
        rollback(store, 99)
