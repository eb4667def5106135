"""fsck, rollback and recover, as a user runs them on real graph folders."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from flowrl import cli, durable, notices, sealed
from flowrl.errors import EXIT_BUSY, ExpertError, FileRefusedError
from flowrl.experts import manifest as manifests
from flowrl.experts.store import ExpertStore
from flowrl.layout import GraphLayout
from flowrl.parallel.claim import Claim
from flowrl.parallel.codec import StateFile
from flowrl.parallel.recovering import recover_state
from flowrl.parallel.run_folders import fail_run
from flowrl.parallel.skill_book import SkillBook
from flowrl.parallel.status import Running
from flowrl.parallel.training_processor import recover_graph
from tests.experts.making import all_files, contents, make_expert
from tests.parallel.making import (
    LIBRARY,
    PICKAXE,
    SWORD,
    TABLE,
    WOOD,
    finish,
    frames,
    merge,
    prepare,
    train,
)

Damage = Callable[[GraphLayout], object]


@pytest.fixture(scope="module")
def template(tmp_path_factory) -> GraphLayout:
    """Expert 0 in two versions, of generations 1 and 3, and expert 1 in one of generation 2."""
    layout = GraphLayout(tmp_path_factory.mktemp("template") / "graph")
    book = SkillBook(layout)
    train(layout, WOOD, 0, {}, acted={0: 50})
    train(layout, TABLE, 1, {WOOD: 0}, acted={1: 20})
    train(layout, WOOD, 0, {}, acted={0: 70})
    for skill in (WOOD, TABLE):
        book.record(LIBRARY[skill])
    sealed.write(layout.config_json, {"format": 1, "env_name": "Craftax-Classic-Symbolic-v1"})
    recover_state(layout)
    return layout


@pytest.fixture
def graph(template, tmp_path) -> GraphLayout:
    shutil.copytree(template.root, tmp_path / "graph")
    return GraphLayout(tmp_path / "graph")


def flowrl(capsys, *words) -> tuple[int, str]:
    """The exit code of a command, and what it said."""
    code = cli.main([str(word) for word in words])
    said = capsys.readouterr()
    return code, said.out + said.err


def fsck(capsys, layout: GraphLayout, *flags: str) -> tuple[int, str]:
    return flowrl(capsys, "fsck", layout.root, *flags)


def statuses(layout: GraphLayout) -> dict[str, str]:
    state = StateFile(layout.scheduler_state).load()
    assert state is not None
    return {entry.skill: entry.status.word for entry in state.entries.values()}


def flip(path: Path, bit: int = 0) -> None:
    """Flip one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1 << bit
    path.write_bytes(content)


def version_file(layout: GraphLayout, expert: int, generation: int | None = None) -> Path:
    store = ExpertStore(layout)
    known = store.manifest()
    if generation is not None:
        known = manifests.read_file(manifests.history_file(layout, generation))
    return store.path_of(known.experts[expert]) / "arrays" / "d0"


# --- fsck


def test_a_whole_graph_is_clean_and_looking_changes_nothing(graph, capsys):
    before = all_files(graph.root)
    assert fsck(capsys, graph) == (0, f"{graph.root}: clean\n")
    code, said = fsck(capsys, graph, "--json")
    assert (code, json.loads(said)["clean"], json.loads(said)["findings"]) == (0, True, [])
    assert all_files(graph.root) == before


def test_a_folder_that_is_no_graph_is_refused(tmp_path, capsys):
    for command in ("fsck", "rollback", "recover"):
        code, said = flowrl(capsys, command, tmp_path)
        assert code == 1
        assert "is no graph" in said
    assert list(tmp_path.iterdir()) == []


def half_written(layout: GraphLayout) -> None:
    part = layout.checkpoints / ".global_latest.json.0a.part"
    part.touch(mode=0o600)
    part.write_text("half")


def leave(*words: str) -> Damage:
    return lambda layout: make_expert(layout.root.joinpath(*words), "left")


def forget(layout: GraphLayout) -> None:
    """Another state says that expert 1 is another skill's."""
    StateFile(layout.scheduler_state).save(
        _renumbered(StateFile(layout.scheduler_state).load(), {WOOD: 1, TABLE: 0})
    )


def _renumbered(state, numbers):
    entries = [
        dataclasses.replace(entry, expert=numbers[entry.skill]) for entry in state.entries.values()
    ]
    return type(state).of(entries, next_expert=2)


def write_ahead(layout: GraphLayout) -> None:
    present = ExpertStore(layout).manifest()
    manifests.write_history(layout, present.after("dead", {}))


DAMAGE: dict[str, tuple[Damage, str]] = {
    "an expert": (lambda g: flip(version_file(g, 0)), "error: expert 0 (Collect Wood)"),
    "the only version": (lambda g: flip(version_file(g, 1)), "error: expert 1 (Place Table)"),
    "a lost version": (
        lambda g: durable.remove_tree(version_file(g, 0).parents[1]),
        "is missing",
    ),
    "a linked array": (
        lambda g: (version_file(g, 0).unlink(), version_file(g, 0).symlink_to("/etc/passwd")),
        "d0 is a link to /etc/passwd",
    ),
    "a spare": (lambda g: flip(version_file(g, 0, 1)), "nothing uses it now"),
    "a lost spare": (
        lambda g: durable.remove_tree(version_file(g, 0, 1).parents[1]),
        "nothing uses it now",
    ),
    "a generation": (lambda g: flip(g.history / "2.json"), "generation 2 cannot be read"),
    "the newest generation": (lambda g: flip(g.history / "3.json"), "generation 3 cannot be read"),
    "a generation of the future": (write_ahead, "was prepared and never came to count"),
    "the manifest": (lambda g: flip(g.manifest), "error: "),
    "a lost manifest": (lambda g: g.manifest.unlink(), "global_latest.json is lost"),
    "an archived run": (lambda g: flip(g.skill_folder(1, TABLE) / "run.json"), "1_Place_Table/run"),
    "an archived result": (
        lambda g: flip(g.skill_folder(1, TABLE) / "result.json"),
        "1_Place_Table/result.json",
    ),
    "an archived module": (
        lambda g: flip(g.skill_folder(1, TABLE) / "1.py"),
        "1.py is not the module",
    ),
    "another's record": (
        lambda g: durable.copy_file(
            g.skill_folder(0, WOOD) / "run.json", g.skill_folder(1, TABLE) / "run.json"
        ),
        "no merged run of expert 1",
    ),
    "a skill": (lambda g: flip(g.skill_file(WOOD)), "skill_files/Collect_Wood.json"),
    "the state": (lambda g: flip(g.scheduler_state), "scheduler_state.json is damaged"),
    "a lost state": (lambda g: g.scheduler_state.unlink(), "the scheduler's state is lost"),
    "swapped numbers": (forget, "expert 0 is Collect Wood; the state says Place Table"),
    "a half-written file": (half_written, ".part was left behind"),
    "a folder in the making": (leave("skills", "0_Collect_Wood", ".tmp-x"), ".tmp-x was left"),
    "a folder half removed": (leave("training_runs", "skill_1_X.0.trash"), ".trash was left"),
    "Orbax's leftover": (
        leave("skills", "0_Collect_Wood", "expert_0_policy", "x.orbax-checkpoint-tmp-1"),
        "orbax-checkpoint-tmp-1 was left",
    ),
    "a version of nobody": (
        leave("skills", "0_Collect_Wood", "expert_0_policy", "v000009-dead"),
        "v000009-dead of expert 0 is named by no manifest",
    ),
    "a link": (lambda g: (g.skills / "9_X").symlink_to("/etc"), "9_X is a link to /etc"),
    "an open folder": (lambda g: g.skills.chmod(0o755), "skills has mode 755"),
    "an open file": (lambda g: g.manifest.chmod(0o640), "global_latest.json has mode 640"),
}


@pytest.mark.parametrize(("damage", "words"), DAMAGE.values(), ids=DAMAGE.keys())
def test_damage_is_named_then_repaired_once_and_for_all(graph, capsys, damage, words):
    damage(graph)
    code, said = fsck(capsys, graph)
    assert code == 1, said
    assert any(words in line for line in said.splitlines()), said
    assert all(line.count("[") for line in said.splitlines()[:-1]), said
    code, said = fsck(capsys, graph, "--repair")
    assert code == 0, said
    assert "repair: " in said
    assert "not mended" not in said
    again = all_files(graph.root)
    code, said = fsck(capsys, graph, "--repair")
    assert (code, all_files(graph.root)) == (0, again), said
    contents(graph)  # whole, all of them


def test_a_damaged_expert_is_what_it_was_before_and_the_damage_is_kept(graph, capsys):
    broken = version_file(graph, 0)
    flip(broken)
    content = broken.read_bytes()
    assert fsck(capsys, graph, "--repair")[0] == 0
    assert frames(graph) == {0: 50, 1: 20}
    aside = graph.quarantine / broken.relative_to(graph.root)
    assert aside.read_bytes() == content
    assert statuses(graph) == {WOOD: "completed", TABLE: "completed"}
    assert "3 is lost" not in fsck(capsys, graph)[1]
    assert "is lost, and known to be" in fsck(capsys, graph)[1]


def test_an_expert_without_a_whole_version_trains_again_as_the_same_number(graph, capsys):
    flip(version_file(graph, 1))
    code, said = fsck(capsys, graph, "--repair")
    assert code == 0
    assert "Place Table will be trained again" in said
    assert frames(graph) == {0: 70}
    assert statuses(graph) == {WOOD: "completed", TABLE: "waiting"}
    state = StateFile(graph.scheduler_state).load()
    assert state is not None
    assert (state.entries[TABLE].expert, state.next_expert) == (1, 2)
    train(graph, TABLE, 1, {WOOD: 0}, acted={1: 5})
    assert frames(graph) == {0: 70, 1: 5}


def test_a_notice_of_damage_stays_until_a_repair(graph, capsys):
    flip(version_file(graph, 0))
    prepare(graph, PICKAXE, 2, {WOOD: 0, TABLE: 1})
    assert frames(graph) == {0: 50, 1: 20}
    code, said = flowrl(capsys, "status", graph.root)
    assert code == 0
    assert "expert 0 (Collect Wood) was damaged" in " ".join(said.split())
    code, said = fsck(capsys, graph)
    assert code == 0
    assert "note: expert 0 (Collect Wood) was damaged" in said
    assert "withdrawn: the notice damage_expert_0" in fsck(capsys, graph, "--repair")[1]
    assert notices.read(graph) == {}


def test_a_live_run_s_damaged_record_pins_all_until_its_folder_is_set_aside(graph, capsys):
    ready = prepare(graph, PICKAXE, 2, {WOOD: 0, TABLE: 1})
    flip(ready.layout.run_json)
    stale = make_expert(graph.expert_version(0, WOOD, "v000001-stale"), "nobody's")
    lock = os.open(ready.layout.lock, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    code, said = fsck(capsys, graph, "--repair")
    assert code == 1
    assert "still lives: wait for its end" in said
    assert stale.is_dir()
    os.close(lock)
    assert fsck(capsys, graph, "--repair")[0] == 0
    assert not stale.exists()
    assert graph.failed_run(2, PICKAXE, 0).is_dir()


def test_a_finished_run_is_worth_a_note_and_strangers_are_left_alone(graph, capsys):
    ready = prepare(graph, PICKAXE, 2, {WOOD: 0, TABLE: 1})
    finish(ready.layout, {2: 5})
    (graph.skills / "notes.txt").touch(mode=0o600)
    code, said = fsck(capsys, graph, "--repair")
    assert code == 0
    assert f"run {ready.run.run_id} of {PICKAXE} has ended and is not merged" in said
    assert "notes.txt is nothing that flowrl has made" in said
    assert (graph.skills / "notes.txt").exists()


def test_nothing_is_repaired_while_a_scheduler_is_at_work(graph, capsys):
    half_written(graph)
    claim = Claim(graph.daemon_lock)
    claim.acquire()
    before = all_files(graph.root)
    for words in (("fsck", graph.root, "--repair"), ("rollback", graph.root, 2)):
        code, said = flowrl(capsys, *words)
        assert code == EXIT_BUSY
        assert f"process {os.getpid()} on" in said
    assert flowrl(capsys, "recover", graph.root)[0] == EXIT_BUSY
    assert all_files(graph.root) == before
    assert fsck(capsys, graph)[1].endswith("clean\n"), "what it is writing is no leftover"
    claim.release()
    assert fsck(capsys, graph)[0] == 1


# --- the manifest


def test_a_merge_that_was_about_to_count_counts_when_the_manifest_is_restored(graph, capsys):
    write_ahead(graph)
    flip(graph.manifest)
    code, said = fsck(capsys, graph, "--repair")
    assert code == 0
    assert "the manifest is generation 4 of its history again" in said
    assert ExpertStore(graph).manifest().merged[-1] == "dead"


@pytest.mark.parametrize("told_by", ["versions", "archives", "state"])
def test_a_manifest_is_not_restored_when_a_merge_would_be_lost(graph, capsys, told_by):
    merged = ExpertStore(graph).manifest().merged
    for path in (graph.manifest, graph.history / "3.json"):
        flip(path)
    if told_by != "versions":
        durable.remove_tree(graph.expert_folder(0, WOOD))
    if told_by != "archives":
        (graph.skill_folder(0, WOOD) / "run.json").unlink()
    if told_by != "state":
        graph.scheduler_state.unlink()
    before = all_files(graph.root)
    code, said = fsck(capsys, graph, "--repair")
    assert code == 1
    assert f"these later merges would be lost: {merged[2]}" in said
    assert all_files(graph.root) == before
    source, target = said.partition("cp ")[2].split()[:2]
    Path(target).write_bytes(Path(source).read_bytes())
    assert ExpertStore(graph).manifest().generation == 2


def test_an_older_manifest_is_restored_when_only_a_rollback_is_lost(graph, capsys):
    assert flowrl(capsys, "rollback", graph.root, 2)[0] == 0
    for path in (graph.manifest, graph.history / "4.json"):
        flip(path)
    code, said = fsck(capsys, graph, "--repair")
    assert code == 0
    assert "generation 3 of its history again; generation 4 is damaged, too" in said
    assert frames(graph) == {0: 70, 1: 20}


def test_experts_are_not_garbage_because_the_manifest_and_its_history_are_gone(graph, capsys):
    durable.remove_tree(graph.checkpoints)
    before = all_files(graph.root)
    with pytest.raises(FileRefusedError, match="from a backup"):
        recover_graph(graph)
    code, said = fsck(capsys, graph, "--repair")
    assert code == 1
    assert "restore" in said
    assert before.items() <= all_files(graph.root).items()


# --- rollback


def test_the_generations_are_listed_with_what_each_merged(graph, capsys):
    code, said = flowrl(capsys, "rollback", graph.root)
    assert code == 0
    rows = [line for line in said.splitlines() if line[:1].isdigit()]
    merged = ExpertStore(graph).manifest().merged
    assert [run_id in row for run_id, row in zip(merged, rows, strict=True)] == [True] * 3
    assert "(Place Table)" in rows[1]
    assert "counts now" in rows[2]
    (graph.history / "1.json").write_text("{")
    facts = json.loads(flowrl(capsys, "rollback", graph.root, "--json")[1])
    assert [row["written"] is None for row in facts["history"]] == [True, False, False]
    assert facts["generation"] == 3


def test_after_a_rollback_completed_means_that_an_expert_counts(graph, capsys):
    merged = ExpertStore(graph).manifest().merged
    code, said = flowrl(capsys, "rollback", graph.root, 1)
    assert code == 0
    assert "Place Table will be trained again" in said
    assert frames(graph) == {0: 50}
    assert ExpertStore(graph).manifest().merged == merged
    assert statuses(graph) == {WOOD: "completed", TABLE: "waiting"}
    assert fsck(capsys, graph)[0] == 0
    code, said = flowrl(capsys, "rollback", graph.root, 3)
    assert frames(graph) == {0: 70, 1: 20}
    assert "nothing: experts went back" in flowrl(capsys, "rollback", graph.root)[1]


def test_a_rollback_that_was_killed_before_the_state_is_found_and_ended(graph, capsys, monkeypatch):
    state = graph.scheduler_state.read_bytes()
    assert flowrl(capsys, "rollback", graph.root, 1)[0] == 0
    graph.scheduler_state.write_bytes(state)
    code, said = fsck(capsys, graph)
    assert code == 1
    assert "Place Table is completed, but no expert of it is in the manifest" in said
    assert fsck(capsys, graph, "--repair")[0] == 0
    assert statuses(graph)[TABLE] == "waiting"


@pytest.mark.parametrize(
    ("generation", "words"), [(3, "counts now"), (9, "choose among 1 to 3")], ids=str
)
def test_a_rollback_to_nowhere_is_refused(graph, capsys, generation, words):
    before = all_files(graph.root)
    code, said = flowrl(capsys, "rollback", graph.root, generation)
    assert code != 0
    assert words in said
    assert all_files(graph.root) == before


def test_a_rollback_to_a_damaged_version_is_refused(graph, capsys):
    flip(version_file(graph, 0, 1))
    before = all_files(graph.root)
    code, said = flowrl(capsys, "rollback", graph.root, 2)
    assert code == ExpertError.exit_code
    assert "expert 0 (Collect Wood)" in said
    assert all_files(graph.root) == before


# --- recover


def test_a_damaged_state_is_made_anew_and_kept(graph, capsys):
    whole = StateFile(graph.scheduler_state).load()
    for number in (1, 2):
        flip(graph.scheduler_state)
        damaged = graph.scheduler_state.read_bytes()
        code, said = flowrl(capsys, "recover", graph.root)
        assert code == 0
        assert "2 completed, 0 under way, 0 waiting" in said
        kept = graph.root / f"scheduler_state.json.damaged-{number}"
        assert kept.read_bytes() == damaged
        assert str(kept) in said
    assert StateFile(graph.scheduler_state).load() == whole


def test_a_whole_state_is_not_touched(graph, capsys):
    before = graph.scheduler_state.read_bytes()
    code, said = flowrl(capsys, "recover", graph.root)
    assert (code, graph.scheduler_state.read_bytes()) == (0, before)
    assert "is whole: there is nothing to recover" in said


def test_live_runs_are_taken_up_and_no_number_is_given_twice(graph, capsys):
    ready = prepare(graph, PICKAXE, 5, {WOOD: 0, TABLE: 1})
    prepare(graph, SWORD, 8, {WOOD: 0, TABLE: 1})
    fail_run(graph, 8, SWORD)
    assert flowrl(capsys, "rollback", graph.root, 1)[0] == 0
    graph.scheduler_state.unlink()
    code, said = flowrl(capsys, "recover", graph.root, "--json")
    assert code == 0
    facts = json.loads(said)
    assert {row["skill"]: (row["status"], row["expert"]) for row in facts["skills"]} == {
        WOOD: ("completed", 0),
        TABLE: ("waiting", 1),
        PICKAXE: ("running", 5),
        SWORD: ("waiting", 8),
    }
    assert facts["next_expert"] == 9
    state = StateFile(graph.scheduler_state).load()
    assert state is not None
    status = state.entries[PICKAXE].status
    assert isinstance(status, Running)
    assert (status.run_id, status.handle) == (ready.run.run_id, None)


def test_a_lost_record_costs_a_success_rate_and_no_expert(graph, capsys):
    flip(graph.skill_folder(1, TABLE) / "result.json")
    graph.scheduler_state.unlink()
    assert flowrl(capsys, "recover", graph.root)[0] == 0
    assert statuses(graph) == {WOOD: "completed", TABLE: "completed"}
    assert "the record of its training is not" in notices.read(graph)["record_expert_1"]


def test_a_run_that_was_merged_and_not_archived_is_completed(graph, capsys, monkeypatch):
    ready = prepare(graph, PICKAXE, 2, {WOOD: 0, TABLE: 1})
    finish(ready.layout, {2: 5})
    monkeypatch.setenv("FLOWRL_FAULT", "merge.committed:raise")
    with pytest.raises(OSError, match="injected"):
        merge(graph, ready)
    monkeypatch.delenv("FLOWRL_FAULT")
    code, said = fsck(capsys, graph)
    assert code == 0
    assert "it archives what it has merged" in said
    graph.scheduler_state.unlink()
    assert flowrl(capsys, "recover", graph.root)[0] == 0
    assert statuses(graph)[PICKAXE] == "completed"
