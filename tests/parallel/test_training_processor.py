from __future__ import annotations

import dataclasses
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flowrl import storage
from flowrl.config import BottomUpConfig
from flowrl.errors import FileRefusedError, ResultRefusedError
from flowrl.experts.merge import UseCandidate
from flowrl.experts.store import ExpertStore
from flowrl.parallel.events import RunRequest
from flowrl.parallel.training_backend import TrainingBackend
from flowrl.parallel.training_processor import process_completed_training, recover_graph
from flowrl.parallel.training_setup import PreparedRun
from flowrl.paths import GraphPaths, RunPaths
from flowrl.runs import read_result, read_run, write_result
from tests import sealing
from tests.experts.making import all_files, contents, make_expert
from tests.machine import living
from tests.parallel.faults import killed_at
from tests.parallel.making import (
    GRAPH,
    PICKAXE,
    SWORD,
    TABLE,
    WOOD,
    finish,
    frames,
    merge,
    merge_finished,
    prepare,
    report_anew,
    train,
    tree,
)
from tests.sealing import edit

MILLION = 1_000_000
COMPLETED = {WOOD: 0, TABLE: 1}


@pytest.fixture
def trained(graph_paths) -> GraphPaths:
    """A graph with experts 0 (50 frames) and 1 (20 frames)."""
    train(graph_paths, WOOD, 0, {}, acted={0: 50})
    train(graph_paths, TABLE, 1, {WOOD: 0}, acted={1: 20})
    return graph_paths


def finished(
    graph_paths: GraphPaths, skill: str = PICKAXE, expert: int = 4, acted=None
) -> PreparedRun:
    ready = prepare(graph_paths, skill, expert, COMPLETED)
    finish(ready.run_paths, acted or {0: 5, expert: 30})
    return ready


# --- what a merge does


def test_experts_of_an_earlier_update_are_credited_as_far_as_they_acted(trained):
    ready = finished(trained)
    rewrite(ready.run_paths, frames=90, kept_update=3, last_success_rate=0.1)
    merge(trained, ready)
    assert frames(trained) == {0: 55, 1: 20, 4: 30}


def test_a_first_run_becomes_expert_and_archive(graph_paths):
    ready = prepare(graph_paths, WOOD, 0, {})
    finish(ready.run_paths, {0: 50})
    done = merge(graph_paths, ready)
    assert done["experts"][0]["verdict"] == "take"
    assert (done["run_id"], done["generation"], done["frames"]) == (ready.run.run_id, 1, 50)
    assert done["wall_seconds"] == 1.5
    assert done["already_merged"] is False
    assert frames(graph_paths) == {0: 50}
    home = graph_paths.root / "skills" / "0_Collect_Wood"
    assert {path.name for path in home.iterdir()} == {
        "0.py",
        "expert_0_policy",
        "metrics.jsonl",
        "result.json",
        "run.json",
        "training.log",
    }
    assert (home / "training.log").read_text() == f"log of {ready.run.run_id}\n"
    assert tree(graph_paths.training_runs) == []


def test_every_expert_that_acted_is_updated_and_no_other(trained):
    before = ExpertStore(trained).manifest().experts
    done = train(trained, PICKAXE, 4, COMPLETED, acted={0: 5, 4: 30})
    assert frames(trained) == {0: 55, 1: 20, 4: 30}
    assert {i: entry["verdict"] for i, entry in done["experts"].items()} == {
        0: "take",
        1: "keep",
        4: "take",
    }
    assert ExpertStore(trained).manifest().experts[1] == before[1]
    assert len(list(trained.expert_folder(1, TABLE).iterdir())) == 1


def test_total_accounting_credits_every_changed_expert_with_all_steps(trained):
    ready = finished(trained, PICKAXE, 4, {0: 5, 1: 5, 4: 70})
    merge(trained, ready, frame_accounting="total")
    assert frames(trained) == {0: 130, 1: 100, 4: 80}


def test_a_merge_rule_sees_ancestor_current_and_candidate(trained):
    stale = finished(trained, PICKAXE, 2, {0: 3, 2: 1})
    first = finished(trained, SWORD, 3, {0: 9, 3: 1})
    merge(trained, first)
    seen = {}

    def rule(ancestor, current, candidate, evidence):
        seen[candidate.expert] = (ancestor, current, candidate)
        return UseCandidate(why="told to")

    merge(trained, stale, merge_policy=rule)
    ancestor, current, candidate = seen[0]
    assert (ancestor.frames, current.frames, candidate.gained) == (50, 59, 3)
    assert set(seen) == {0}, "a new expert needs no opinion"
    assert frames(trained)[0] == 53


def test_twice_is_once_also_when_the_folder_is_gone(trained):
    ready = finished(trained)
    first = merge(trained, ready)
    before = all_files(trained.root)
    again = merge(trained, ready)
    assert again["already_merged"] is True
    assert {i: e["frames"] for i, e in again["experts"].items()} == {
        i: e["frames"] for i, e in first["experts"].items()
    }
    assert again["experts"][4]["verdict"] == "take"
    assert all_files(trained.root) == before


def test_a_merged_run_whose_folder_came_back_is_only_cleaned_away(trained):
    ready = finished(trained)
    copy = trained.root.parent / "copy"
    shutil.copytree(ready.run_folder, copy)
    merge(trained, ready)
    manifest = trained.manifest.read_bytes()
    shutil.copytree(copy, ready.run_folder)
    assert merge(trained, ready)["already_merged"] is True
    assert trained.manifest.read_bytes() == manifest
    assert tree(trained.training_runs) == []


def test_a_run_that_never_was_is_refused(trained):
    with pytest.raises(FileRefusedError, match="does not exist"):
        process_completed_training(trained.run(4, PICKAXE).folder, PICKAXE, 4, trained.root)


def test_a_skill_trained_again_starts_from_its_expert_and_replaces_its_archive(graph_paths):
    train(graph_paths, WOOD, 0, {}, acted={0: 50})
    done = train(graph_paths, WOOD, 0, {}, acted={0: 70})
    archive = RunPaths(graph_paths.skill_folder(0, WOOD), 0)
    assert json.loads(archive.run_json.read_text())["run_id"] == done["run_id"]
    assert frames(graph_paths) == {0: 120}
    assert done["experts"][0]["verdict"] == "take"
    (ancestor,) = read_run(archive).ancestors
    assert (ancestor.index, ancestor.frames) == (0, 50)


def with_tracker_files(ready: PreparedRun, word: str) -> None:
    """What TensorBoard, an offline W&B and a long log leave, links and all."""
    events = ready.run_paths.tensorboard / "events.out.tfevents.1"
    run = ready.run_paths.wandb / "offline-run-1" / "run-1.wandb"
    for file in (events, run):
        file.parent.mkdir(parents=True)
        file.write_text(word)
    (ready.run_paths.wandb / "latest-run").symlink_to("offline-run-1")
    (ready.run_paths.wandb / "debug.log").symlink_to("/etc/passwd")
    ready.run_paths.older_training_log.write_text(word)


ARCHIVED = {
    "tensorboard/events.out.tfevents.1",
    "wandb/offline-run-1/run-1.wandb",
    "training.log.1",
}


def archived(home: Path) -> dict[str, str]:
    """The archived files of trackers and the older log, with what they say."""
    names = (*home.glob("tensorboard/**/*"), *home.glob("wandb/**/*"), *home.glob("*.log.1"))
    files = {path.relative_to(home).as_posix(): path for path in names if not path.is_dir()}
    assert not any(path.is_symlink() for path in files.values())
    return {name: path.read_text() for name, path in files.items()}


def test_what_trackers_wrote_is_archived_without_their_links(trained):
    home = trained.skill_folder(4, PICKAXE)
    ready = finished(trained)
    with_tracker_files(ready, "first")
    merge(trained, ready)
    assert archived(home) == dict.fromkeys(ARCHIVED, "first")
    again = finished(trained)
    with_tracker_files(again, "second")
    merge(trained, again)
    assert archived(home) == dict.fromkeys(ARCHIVED, "second")
    merge(trained, finished(trained))
    assert archived(home) == {}, "that of another run"


def test_a_tracker_s_folder_that_is_a_link_does_not_stop_a_merge(trained, caplog):
    ready = finished(trained)
    ready.run_paths.wandb.symlink_to("/etc")
    assert merge(trained, ready)["experts"][4]["verdict"] == "take"
    assert "wandb is not archived" in caplog.text
    assert archived(trained.skill_folder(4, PICKAXE)) == {}
    assert tree(trained.training_runs) == []


# --- what is refused


def rewrite(run_paths: RunPaths, **changes) -> None:
    write_result(run_paths, dataclasses.replace(read_result(run_paths), **changes))


def edit_report(run_paths: RunPaths, position: int, **changes) -> None:
    reports = list(read_result(run_paths).experts)
    reports[position] = dataclasses.replace(reports[position], **changes)
    rewrite(run_paths, experts=tuple(reports))


def link_log(run_paths: RunPaths) -> None:
    run_paths.training_log.unlink()
    run_paths.training_log.symlink_to("/etc/passwd")


def link_array(run_paths: RunPaths) -> None:
    file = run_paths.final(1) / "arrays" / "d0"
    file.rename(run_paths.folder / "d0")
    file.symlink_to(run_paths.folder / "d0")


def with_arrays(run_paths: RunPaths, position: int, **arrays) -> None:
    """Save an expert anew, and report its files and arrays as they are."""
    storage.remove_tree(run_paths.final(position))
    make_expert(run_paths.final(position), "other", **arrays)
    report_anew(run_paths, position)


def unreadable_arrays(run_paths: RunPaths) -> None:
    (node,) = (path for path in (run_paths.final(2) / "arrays").iterdir() if path.name != "d0")
    node.write_bytes(bytes(len(node.read_bytes())))
    edit_report(run_paths, 2, sha256=storage.tree_digest(run_paths.final(2)))


REFUSALS = {
    "run of another attempt": (lambda p: rewrite(p, run_id="e4.a9.ff"), "+ run id e4.a9.ff"),
    "expert left out": (
        lambda p: rewrite(p, experts=read_result(p).experts[:2]),
        "- experts [0, 1, 4]\n+ experts [0, 1]",
    ),
    "expert too many": (
        lambda p: edit_report(p, 2, expert=5),
        "- experts [0, 1, 4]\n+ experts [0, 1, 5]",
    ),
    "expert twice": (lambda p: edit_report(p, 1, expert=0), "+ experts [0, 0, 4]"),
    "frames that nobody acted": (
        lambda p: rewrite(p, frames=36),
        "over all experts, 36\n+ acted steps, over all experts, 35",
    ),
    "more acted than frames, of a kept update": (
        lambda p: rewrite(p, frames=34, kept_update=1, last_success_rate=0.1),
        "over all experts, 34\n+ acted steps, over all experts, 35",
    ),
    "steps left out": (lambda p: rewrite(p, step_success=()), "+ steps of the plan 0"),
    "a NaN": (
        lambda p: edit(p.result_json, '"wall_seconds": 1.5', '"wall_seconds": NaN'),
        "NaN is not a number",
    ),
    "a bit flip": (
        lambda p: (p.final(2) / "arrays" / "d0").write_text("flipped"),
        "+ expert 4 sha256",
    ),
    "a truncated array": (
        lambda p: (p.final(2) / "arrays" / "d0").write_bytes(b""),
        "+ expert 4 sha256",
    ),
    "an expert's files lost": (lambda p: storage.remove_tree(p.final(1)), "expert_2']"),
    "arrays that are not finite": (
        lambda p: with_arrays(p, 2, values=(1.0, math.nan)),
        "- expert 4 actor/dense_3/bias finite\n+ expert 4 actor/dense_3/bias NaN or infinite",
    ),
    "an infinite array": (
        lambda p: with_arrays(p, 0, values=(-math.inf,)),
        "+ expert 0 actor/dense_3/bias NaN or infinite",
    ),
    "another digest of its arrays": (
        lambda p: edit_report(p, 2, content="0" * 64),
        f"- expert 4 content {'0' * 64}\n+ expert 4 content ",
    ),
    "an unchanged expert said to be changed": (
        lambda p: edit_report(p, 1, content="1" * 64),
        "- expert 1 content",
    ),
    "arrays that nobody can read": (unreadable_arrays, "  expert 4 cannot be read: "),
    "no final experts": (lambda p: storage.remove_tree(p.finals), "is not a folder"),
    "a folder beside them": (lambda p: (p.finals / "expert_3").mkdir(), "'expert_3']"),
    "a link for an array": (link_array, "is a link"),
    "a link for the log": (link_log, "+ training.log a link"),
    "half a result": (
        lambda p: p.result_json.write_text(p.result_json.read_text()[:99]),
        "not valid JSON",
    ),
    "no result": (lambda p: p.result_json.unlink(), "result.json"),
    "an ancestor left out": (
        lambda p: sealing.rewrite(p.run_json, lambda run: run.update(ancestors=[])),
        "- ancestors [0, 1]\n+ ancestors []",
    ),
    "another environment": (
        lambda p: edit(p.run_json, "Craftax-Classic-Symbolic-v1", "Chess"),
        "Chess",
    ),
}


@pytest.mark.parametrize(("damage", "words"), REFUSALS.values(), ids=REFUSALS.keys())
def test_a_result_that_is_not_whole_changes_nothing(trained, damage, words):
    ready = finished(trained)
    damage(ready.run_paths)
    before = all_files(trained.root)
    with pytest.raises(ResultRefusedError) as refused:
        merge(trained, ready)
    assert words in str(refused.value)
    assert str(ready.run_folder) in str(refused.value)
    assert all_files(trained.root) == before


@pytest.mark.parametrize(
    ("skill", "expert"), [(SWORD, 4), (PICKAXE, 5)], ids=["other skill", "other expert"]
)
def test_a_call_for_another_run_than_the_folder_s_is_refused(trained, skill, expert):
    ready = finished(trained)
    (ready.run_folder / "5.py").write_text("")
    with pytest.raises(FileRefusedError, match=r"is of expert 4 \(Make Wood Pickaxe\)"):
        process_completed_training(ready.run_folder, skill, expert, trained.root)
    assert ready.run_paths.result_json.exists()


# --- recovery


def test_recovery_merges_every_finished_run_and_leaves_the_rest(trained):
    done = finished(trained, PICKAXE, 2)
    broken = finished(trained, SWORD, 3)
    (broken.run_paths.final(0) / "arrays" / "d0").write_text("flipped")
    waiting = prepare(trained, "Collect Drink", 5, {})
    (trained.training_runs / ".tmp-skill_9_X").mkdir()
    (trained.training_runs / "skill_8_X.0.trash").mkdir()
    (trained.training_runs / "notes.txt").write_text("of a person")
    merged, refused = merge_finished(trained)
    assert [summary["run_id"] for summary in merged] == [done.run.run_id]
    assert list(refused) == [broken.run_folder]
    assert "+ expert 0 sha256" in refused[broken.run_folder]
    assert {path.name for path in trained.training_runs.iterdir()} == {
        broken.run_folder.name,
        waiting.run_folder.name,
        "notes.txt",
    }
    assert merge_finished(trained)[0] == []


def test_recovery_leaves_a_living_run_alone(trained):
    ready = finished(trained)
    kill_a_merge(trained, ready, "merge.committed")
    with living(ready.run_paths):
        recover_graph(trained)
        assert ready.run_folder.is_dir()
    recover_graph(trained)
    assert not ready.run_folder.exists()


def test_recovery_leaves_a_finished_run_to_the_scheduler(trained):
    ready = finished(trained)
    recover_graph(trained)
    assert ready.run_paths.result_json.exists()
    assert ready.run.run_id not in ExpertStore(trained).manifest().merged


def test_a_live_run_keeps_its_ancestors_from_the_garbage(trained):
    ready = prepare(trained, SWORD, 3, COMPLETED)
    ancestor = ready.run.ancestors[0]
    for _ in range(22):
        train(trained, WOOD, 0, {}, acted={0: frames(trained)[0] + 1})
    recover_graph(trained)
    names = {path.name for path in trained.expert_folder(0, WOOD).iterdir()}
    assert ancestor.version in names
    assert len(names) == 21
    finish(ready.run_paths, {3: 1})
    merge(trained, ready)
    recover_graph(trained)
    assert not (trained.expert_folder(0, WOOD) / ancestor.version).exists()


# --- crashes and failing disks

POINTS = [
    "merge.verified",
    "commit.copied",
    "commit.published",
    "write.3.json",
    "commit.history",
    "write.global_latest.json",
    "commit.swapped",
    "write.global_latest.pkl",
    "merge.committed",
    "merge.archived",
    "remove_tree.renamed",
    "merge.removed",
]


def test_a_removal_that_an_error_has_interrupted_is_finished_by_the_next_archiving(
    graph_paths, monkeypatch
):
    """As a lack of descriptors interrupts it: the folder has its other name already."""
    ready = prepare(graph_paths, WOOD, 0, {})
    finish(ready.run_paths, {0: 10})
    backend = TrainingBackend(graph_paths, BottomUpConfig(), GRAPH)
    request = RunRequest(skill=WOOD, expert=0, attempt=1, run_id=ready.run.run_id)
    backend.merge(request)
    monkeypatch.setenv("FLOWRL_FAULT", "remove_tree.renamed:raise")
    with pytest.raises(OSError, match="injected"):
        backend.archive(request)
    monkeypatch.delenv("FLOWRL_FAULT")
    backend.archive(request)
    assert list(graph_paths.training_runs.iterdir()) == []


def whole_state(graph_paths: GraphPaths) -> tuple:
    return contents(graph_paths), ExpertStore(graph_paths).manifest().merged, tree(graph_paths.root)


def kill_a_merge(graph_paths: GraphPaths, ready: PreparedRun, point: str) -> None:
    words = (graph_paths.root, ready.run_folder, ready.run.expert, ready.run.skill)
    assert killed_at(point, "tests.chaos.merge_once", *words)


@pytest.mark.parametrize("point", POINTS)
def test_killed_at_a_named_point_a_run_is_merged_exactly_once(trained, point):
    ready = finished(trained)
    with_tracker_files(ready, "kept")
    before = contents(trained)
    reference = _merged_elsewhere(trained, ready)
    kill_a_merge(trained, ready, point)
    assert contents(trained) in (before, reference[0])
    merge_finished(trained)
    assert whole_state(trained) == reference


@pytest.mark.parametrize("point", POINTS)
def test_the_same_call_again_ends_what_a_kill_interrupted(trained, point):
    ready = finished(trained)
    reference = _merged_elsewhere(trained, ready)
    kill_a_merge(trained, ready, point)
    again = merge(trained, ready)
    assert again["already_merged"] is (POINTS.index(point) >= POINTS.index("commit.swapped"))
    assert whole_state(trained)[:2] == reference[:2]


def _copied(graph_paths: GraphPaths, root: Path) -> GraphPaths:
    shutil.copytree(graph_paths.root, root, symlinks=True)
    return GraphPaths(root)


def _merged_elsewhere(graph_paths: GraphPaths, ready: PreparedRun) -> tuple:
    """What the graph looks like after an undisturbed merge of this run."""
    other = _copied(graph_paths, graph_paths.root.with_name("reference"))
    merge(other, dataclasses.replace(ready, run_paths=other.run(ready.run.expert, ready.run.skill)))
    return whole_state(other)


def test_the_daemon_s_side_loads_no_arrays():
    code = (
        "import sys, flowrl.parallel.scheduler;"
        "import flowrl.parallel.training_setup, flowrl.parallel.training_processor;"
        "sys.exit(bool({'jax', 'numpy', 'orbax', 'flax'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
