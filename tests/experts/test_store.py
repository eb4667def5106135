from __future__ import annotations

import dataclasses
import errno
import itertools
import json
import multiprocessing
import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from flowrl import storage
from flowrl.errors import (
    BusyError,
    ExpertCorruptError,
    ExpertIndexError,
    ExpertMissingError,
    FileRefusedError,
    GraphDamagedError,
)
from flowrl.experts import manifest as manifests
from flowrl.experts import repair
from flowrl.experts.merge import (
    MERGE_RULES,
    Blended,
    Compared,
    Evidence,
    Question,
    Unanswered,
    UseCandidate,
    frame_count,
)
from flowrl.experts.store import ExpertStore
from flowrl.paths import GraphPaths
from tests.experts.making import all_files, candidate_in, content_of, contents, make_expert
from tests.sealing import edit

RULE = frame_count


@pytest.fixture
def graph_paths(tmp_path) -> GraphPaths:
    return GraphPaths(tmp_path / "graph")


@pytest.fixture
def store(graph_paths) -> ExpertStore:
    return ExpertStore(graph_paths)


def merge(store: ExpertStore, run_id: str, *, expert: int, acted: int, ancestor=None):
    folder = store.graph_paths.root / "offers" / f"{run_id}.{expert}"
    if not folder.exists():
        make_expert(folder, f"{run_id} of {expert}")
    return store.commit(run_id, [candidate_in(folder, expert, acted, ancestor)], rule=RULE)


def test_a_new_graph_has_no_experts_and_reading_it_writes_nothing(store, graph_paths):
    assert store.manifest() == manifests.Manifest()
    assert not graph_paths.root.exists()


def test_a_merge_is_found_again_as_it_was_offered(store, graph_paths):
    merge(store, "e0.a1.aa", expert=0, acted=5)
    version = ExpertStore(graph_paths).manifest().experts[0]
    assert (version.frames, version.version) == (5, "v000001-e0.a1.aa")
    assert content_of(store.verify(version)) == "e0.a1.aa of 0"
    assert [(part.run_id, part.frames) for part in version.lineage] == [("e0.a1.aa", 5)]


@pytest.mark.parametrize("wanted", ["Skill 3", " skill 3", "skill_3", "3"])
def test_a_run_is_found_by_the_name_the_machine_name_or_the_number_of_its_skill(store, wanted):
    merge(store, "e3.a1.x", expert=3, acted=10)
    assert store.archive_of(wanted) == store.graph_paths.archive(3, "Skill 3")
    with pytest.raises(ExpertMissingError, match="'skil 3'; closest is 'Skill 3'; merged are: "):
        store.archive_of("skil 3")


def test_the_manifest_on_disk_is_what_the_documents_say(store, graph_paths):
    merge(store, "r1", expert=0, acted=5)
    facts = json.loads(graph_paths.manifest.read_text())
    assert list(facts) == ["format", "generation", "experts", "merged", "sha256"]
    assert list(facts["experts"][0]) == [
        "index",
        "skill",
        "version",
        "frames",
        "sha256",
        "content",
        "shapes",
        "lineage",
    ]
    assert (facts["generation"], facts["merged"]) == (1, ["r1"])
    assert json.loads((graph_paths.history / "1.json").read_text()) == facts


def test_the_pickle_holds_the_same_facts_as_plain_dicts(store, graph_paths):
    merge(store, "r1", expert=3, acted=5)
    facts = pickle.loads(graph_paths.manifest_pickle.read_bytes())
    assert facts["experts"][3]["frames"] == 5
    assert facts["merged"] == ["r1"]
    assert b"flowrl" not in graph_paths.manifest_pickle.read_bytes()


def test_only_what_the_rule_uses_gets_a_new_version(store, graph_paths):
    merge(store, "r1", expert=0, acted=50)
    old = store.manifest().experts[0]
    folders = [make_expert(graph_paths.root / "o" / str(i), f"r2 of {i}") for i in range(2)]
    offers = [candidate_in(folders[0], 0, 0, old), candidate_in(folders[1], 1, 9)]
    store.commit("r2", offers, rule=RULE)
    assert store.manifest().experts[0] == old
    assert [path.name for path in graph_paths.expert_folder(0, "Skill 0").iterdir()] == [
        old.version
    ]
    assert contents(graph_paths)[1] == (9, "r2 of 1")


@pytest.mark.parametrize("order", list(itertools.permutations([80, 100, 90])), ids=str)
def test_the_expert_with_most_frames_wins_in_any_order(store, graph_paths, order):
    merge(store, "r0", expert=0, acted=50)
    ancestor = store.manifest().experts[0]
    for acted in order:
        merge(store, f"r{acted}", expert=0, acted=acted, ancestor=ancestor)
    assert contents(graph_paths) == {0: (150, "r100 of 0")}
    lineage = store.manifest().experts[0].lineage
    assert [(part.run_id, part.frames) for part in lineage] == [("r0", 50), ("r100", 100)]
    assert set(store.manifest().merged) == {"r0", "r80", "r90", "r100"}


def test_a_stale_run_is_judged_by_its_own_ancestor(store):
    merge(store, "r0", expert=0, acted=10)
    ancestor = store.manifest().experts[0]
    for number in (1, 2, 3):
        now = store.manifest().experts[0]
        merge(store, f"r{number}", expert=0, acted=10, ancestor=now)
    merge(store, "short", expert=0, acted=25, ancestor=ancestor)
    assert store.manifest().experts[0].frames == 40
    merge(store, "long", expert=0, acted=35, ancestor=ancestor)
    assert store.manifest().experts[0].frames == 45
    assert [p.run_id for p in store.manifest().experts[0].lineage] == ["r0", "long"]


def test_an_ancestor_that_the_history_forgot_keeps_its_lineage(store):
    merge(store, "r0", expert=0, acted=10)
    ancestor = store.manifest().experts[0]
    merge(store, "r1", expert=0, acted=1, ancestor=ancestor)
    for number in range(manifests.KEPT_GENERATIONS):
        merge(store, f"other{number}", expert=1, acted=number + 1)
    merge(store, "late", expert=0, acted=99, ancestor=ancestor)
    lineage = store.manifest().experts[0].lineage
    assert [(p.run_id, p.frames) for p in lineage] == [("r0", 10), ("late", 99)]


def test_an_offer_that_is_not_what_its_candidate_says_changes_nothing(store, graph_paths):
    merge(store, "r0", expert=0, acted=10)
    before = graph_paths.manifest.read_bytes()
    folder = make_expert(graph_paths.root / "o", "fine")
    offered = candidate_in(folder, 1, 5)
    (folder / "arrays" / "d0").write_text("changed meanwhile")
    with pytest.raises(ExpertCorruptError, match="expert 1"):
        store.commit("r1", [offered], rule=RULE)
    assert graph_paths.manifest.read_bytes() == before


def test_a_merge_that_others_have_overtaken_does_not_count(store, graph_paths):
    merge(store, "e1.a1.aa", expert=1, acted=10)

    def taken() -> None:
        raise BusyError("another host's scheduler has the graph")

    with pytest.raises(BusyError, match="another host"):
        merge(ExpertStore(graph_paths, taken), "e2.a1.aa", expert=2, acted=10)
    assert store.manifest().merged == ("e1.a1.aa",)


def test_an_index_belongs_to_one_skill(store, graph_paths):
    merge(store, "r0", expert=0, acted=10)
    stranger = candidate_in(make_expert(graph_paths.root / "o", "x"), 0, 50)
    stranger = dataclasses.replace(stranger, skill="Other")
    with pytest.raises(ExpertIndexError, match=r"'Skill 0'.*'Other'"):
        store.commit("r1", [stranger], rule=RULE)


@pytest.mark.parametrize("run_id", ["../x", "", "a/b", ".tmp-x", "a\nb"], ids=repr)
def test_a_run_id_that_is_no_file_name_is_refused(store, graph_paths, run_id):
    with pytest.raises(FileRefusedError, match="run id"):
        store.commit(run_id, [], rule=RULE)
    assert not graph_paths.root.exists()


# --- rules that ask questions


def rivals(store: ExpertStore):
    """Expert 0 of 10 frames, 5 more by one run that is merged, and 15 more by one that is not."""
    merge(store, "r0", expert=0, acted=10)
    ancestor = store.manifest().experts[0]
    merge(store, "r1", expert=0, acted=5, ancestor=ancestor)
    folder = make_expert(store.graph_paths.root / "offers" / "late", "of the late one")
    return [candidate_in(folder, 0, 15, ancestor)]


def blended(store: ExpertStore, asked: Question) -> dict[int, Evidence]:
    folder = make_expert(store.graph_paths.root / "blend", "blended")
    digest = storage.tree_digest(folder)
    return {0: Blended(question=asked, folder=folder, sha256=digest, content="mean")}


def test_a_blend_is_published_with_the_runs_of_both_sides(store, graph_paths):
    offers = rivals(store)
    (asked,) = store.questions("late", offers, rule=MERGE_RULES["frame_average"])
    assert asked.gains == (5, 15)
    store.commit("late", offers, rule=MERGE_RULES["frame_average"], evidence=blended(store, asked))
    version = store.manifest().experts[0]
    assert contents(graph_paths) == {0: (30, "blended")}
    assert (version.content, version.frames) == ("mean", 30)
    assert [(p.run_id, p.frames) for p in version.lineage] == [("r0", 10), ("r1", 5), ("late", 15)]


@pytest.mark.parametrize("name", ["frame_average", "eval_gate"])
def test_evidence_about_a_version_that_counts_no_more_changes_nothing(store, graph_paths, name):
    offers = rivals(store)
    (asked,) = store.questions("late", offers, rule=MERGE_RULES[name])
    merge(store, "r2", expert=0, acted=7, ancestor=store.manifest().experts[0])
    before = graph_paths.manifest.read_bytes()
    told = blended(store, asked)
    if name == "eval_gate":
        told = {0: Compared(question=asked, wins=99, losses=0, ties=0)}
    with pytest.raises(BusyError, match="expert 0 was merged by another run meanwhile"):
        store.commit("late", offers, rule=MERGE_RULES[name], evidence=told)
    assert graph_paths.manifest.read_bytes() == before
    (again,) = store.questions("late", offers, rule=MERGE_RULES[name])
    assert again.current != asked.current


def test_a_blend_that_is_not_what_its_maker_said_changes_nothing(store, graph_paths):
    offers = rivals(store)
    (asked,) = store.questions("late", offers, rule=MERGE_RULES["frame_average"])
    told = blended(store, asked)
    flip_a_bit(graph_paths.root / "blend")
    before = graph_paths.manifest.read_bytes()
    with pytest.raises(ExpertCorruptError, match="expert 0"):
        store.commit("late", offers, rule=MERGE_RULES["frame_average"], evidence=told)
    assert graph_paths.manifest.read_bytes() == before


@pytest.mark.parametrize("name", MERGE_RULES)
def test_the_same_run_twice_is_once_by_every_rule(store, graph_paths, name):
    offers = rivals(store)
    rule = MERGE_RULES[name]
    told = {
        question.expert: Unanswered(question=question, why="nobody knows")
        for question in store.questions("late", offers, rule=rule)
    }
    store.commit("late", offers, rule=rule, evidence=told)
    before = graph_paths.manifest.read_bytes()
    assert store.questions("late", offers, rule=rule) == ()
    assert store.commit("late", offers, rule=rule).already_merged is True
    assert graph_paths.manifest.read_bytes() == before
    assert contents(graph_paths)[0][0] == 25


def flip_a_bit(path: Path) -> None:
    file = path / "arrays" / "d0"
    first, *rest = file.read_bytes()
    file.write_bytes(bytes([first ^ 1, *rest]))


@pytest.mark.parametrize(
    "damage",
    [
        flip_a_bit,
        lambda path: (path / "arrays" / "d0").write_bytes(b""),
        lambda path: (path / "_METADATA").unlink(),
        lambda path: (path / "more").write_text(""),
        lambda path: (path / "link").symlink_to("/etc/passwd"),
    ],
    ids=["bit flip", "truncated", "file lost", "file added", "link"],
)
def test_a_damaged_version_is_known_by_its_digest(store, damage):
    merge(store, "r0", expert=0, acted=10)
    version = store.manifest().experts[0]
    damage(store.path_of(version))
    with pytest.raises(ExpertCorruptError, match=r"expert 0 \(Skill 0\)"):
        store.verify(version)


def test_a_lost_version_is_said_to_be_missing(store):
    merge(store, "r0", expert=0, acted=10)
    version = store.manifest().experts[0]
    storage.remove_tree(store.path_of(version))
    with pytest.raises(ExpertMissingError, match=r"expert 0 \(Skill 0\)"):
        store.verify(version)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_text(path.read_text()[:-20]),
        lambda path: path.write_text("[]"),
        lambda path: path.write_text('{"format": 1}'),
        lambda path: edit(path, "v000002-r2", "../../r2"),
        lambda path: edit(path, '"index": 1', '"index": 0'),
        lambda path: path.unlink(),
    ],
    ids=["truncated", "a list", "no experts", "path as version", "listed twice", "lost"],
)
def test_a_damaged_manifest_stops_everything_and_names_the_remedy(store, graph_paths, damage):
    merge(store, "r1", expert=0, acted=1)
    merge(store, "r2", expert=1, acted=1)
    damage(graph_paths.manifest)
    for attempt in (store.manifest, lambda: merge(store, "r3", expert=2, acted=1), store.recover):
        with pytest.raises(GraphDamagedError, match=r"flowrl fsck \S+ --repair, which restores it"):
            attempt()


def test_garbage_is_what_no_kept_manifest_names(store, graph_paths):
    kept = manifests.KEPT_GENERATIONS
    for number in range(kept + 3):
        merge(store, f"r{number}", expert=0, acted=number + 1)
    assert len(list(graph_paths.expert_folder(0, "Skill 0").iterdir())) == kept + 3
    gone = store.collect_garbage(pinned=[(0, "v000001-r0")])
    assert [path.name for path in gone] == ["v000002-r1", "v000003-r2"]
    assert manifests.generations(graph_paths) == tuple(range(4, kept + 4))
    assert contents(graph_paths) == {0: (kept + 3, f"r{kept + 2} of 0")}


def test_a_manifest_is_parsed_once_and_any_change_of_its_file_is_seen(store, graph_paths):
    merge(store, "r0", expert=0, acted=1)
    first, status = store.manifest(), graph_paths.manifest.stat()
    assert store.manifest() is first
    content = graph_paths.manifest.read_bytes()
    graph_paths.manifest.write_bytes(content.replace(b'"r0"', b'"rX"'))
    os.utime(graph_paths.manifest, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(FileRefusedError, match="not what its seal says"):
        store.manifest()
    graph_paths.manifest.write_bytes(content)
    assert store.manifest() is first
    merge(store, "r1", expert=0, acted=2)
    assert store.manifest().generation == 2


def test_a_damaged_history_keeps_every_version(store, graph_paths):
    for number in range(3):
        merge(store, f"r{number}", expert=0, acted=number + 1)
    (graph_paths.history / "2.json").write_text("{")
    (graph_paths.history / "1.json").unlink()
    assert store.collect_garbage() == ()


def test_an_older_manifest_is_refused_before_it_costs_what_was_merged_since(store, graph_paths):
    merge(store, "r0", expert=0, acted=1)
    older = graph_paths.manifest.read_bytes()
    for number in (1, 2):
        merge(store, f"r{number}", expert=number, acted=number)
    before = all_files(graph_paths.root)
    graph_paths.manifest.write_bytes(older)
    for attempt in (store.recover, store.collect_garbage, store.manifest):
        with pytest.raises(GraphDamagedError, match=r"generation 1, .* has generation 3; .* fsck"):
            attempt()
    repair.restore_manifest(graph_paths)
    after = all_files(graph_paths.root)
    assert before.items() <= after.items()
    assert contents(graph_paths)[2] == (2, "r2 of 2")


def test_versions_that_a_lost_newer_manifest_named_are_not_garbage(store, graph_paths):
    merge(store, "r0", expert=0, acted=1)
    older = {
        path: path.read_bytes() for path in (graph_paths.manifest, graph_paths.history / "1.json")
    }
    for number in (1, 2):
        merge(store, f"r{number}", expert=number, acted=number)
    storage.remove_tree(graph_paths.history)  # a backup of all of checkpoints/ comes back
    graph_paths.history.mkdir()
    for path, content in older.items():
        path.write_bytes(content)
    store.recover()
    assert [key for key, _ in store.versions()] == [(0, "v000001-r0"), (2, "v000003-r2")]


def test_recovery_removes_what_a_killed_merge_left(store, graph_paths):
    merge(store, "r0", expert=0, acted=1)
    home = graph_paths.expert_folder(0, "Skill 0")
    for name in ("v000002-dead", ".tmp-dead", "v000001-x.0.trash"):
        make_expert(home / name, "left")
    (graph_paths.checkpoints / ".global_latest.json.part").write_text("half")
    (graph_paths.history / "2.json").write_text((graph_paths.history / "1.json").read_text())
    graph_paths.manifest_pickle.unlink()
    (home / "notes of a person").mkdir()
    store.recover()
    assert sorted(path.name for path in home.iterdir()) == ["notes of a person", "v000001-r0"]
    assert manifests.generations(graph_paths) == (1,)
    assert sorted(path.name for path in graph_paths.checkpoints.iterdir()) == [
        "global.lock",
        "global_latest.json",
        "global_latest.pkl",
        "history",
    ]


def test_what_the_disk_does_not_take_leaves_no_version(store, graph_paths, monkeypatch):
    merge(store, "r0", expert=0, acted=1)
    before, versions = graph_paths.manifest.read_bytes(), list(store.versions())
    flush = storage.flush

    def full(path):
        if "r1" in str(path):
            raise OSError(errno.ENOSPC, "injected", str(path))
        flush(path)

    monkeypatch.setattr(storage, "flush", full)
    with pytest.raises(OSError, match="injected"):
        merge(store, "r1", expert=0, acted=5)
    assert list(store.versions()) == versions
    assert graph_paths.manifest.read_bytes() == before
    monkeypatch.undo()
    assert isinstance(merge(store, "r1", expert=0, acted=5).decisions[0], UseCandidate)


def test_a_replaced_lock_file_stops_the_merge_before_its_swap(store, graph_paths, monkeypatch):
    merge(store, "r0", expert=0, acted=1)
    before = graph_paths.manifest.read_bytes()

    def meanwhile(name: str) -> None:
        if name == "commit.history":
            graph_paths.global_lock.unlink()
            graph_paths.global_lock.touch()

    monkeypatch.setattr(storage, "fault_point", meanwhile)
    with pytest.raises(BusyError, match=r"global\.lock"):
        merge(store, "r1", expert=0, acted=5)
    assert graph_paths.manifest.read_bytes() == before


@pytest.mark.parametrize("before", [True, False], ids=["before the look", "after the look"])
def test_a_reader_during_the_first_merge_finds_no_damage(store, monkeypatch, before):
    generations = manifests.generations

    def merged_meanwhile(graph_paths):
        monkeypatch.setattr(manifests, "generations", generations)
        past = () if before else generations(graph_paths)
        merge(store, "r1", expert=0, acted=5)
        return generations(graph_paths) if before else past

    monkeypatch.setattr(manifests, "generations", merged_meanwhile)
    assert store.manifest().merged in {(), ("r1",)}


def _merge_in_its_own_process(root: Path, number: int, barrier) -> None:
    store = ExpertStore(GraphPaths(root))
    barrier.wait(timeout=200)
    merge(store, f"run{number}", expert=0, acted=number + 1)
    merge(store, f"own{number}", expert=number + 1, acted=7)


def test_six_mergers_at_once_lose_nothing_and_readers_see_no_mix(graph_paths):
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(6)
    mergers = [
        context.Process(target=_merge_in_its_own_process, args=(graph_paths.root, number, barrier))
        for number in range(6)
    ]
    for merger in mergers:
        merger.start()
    seen = []
    ended = threading.Event()

    def read() -> None:
        while not ended.is_set():
            seen.append(contents(graph_paths))  # raises at a version that is not whole

    with ThreadPoolExecutor(max_workers=1) as pool:
        reading = pool.submit(read)
        for merger in mergers:
            merger.join(timeout=200)
        ended.set()
        reading.result(timeout=60)
    assert [merger.exitcode for merger in mergers] == [0] * 6
    manifest = ExpertStore(graph_paths).manifest()
    assert sorted(manifest.merged) == sorted(
        f"{kind}{number}" for kind in ("run", "own") for number in range(6)
    )
    assert manifest.generation == 12
    assert contents(graph_paths)[0] == (6, "run5 of 0")
    frames = [found[0][0] for found in seen if 0 in found]
    assert frames == sorted(frames)
