"""flowrl fsck, as a user runs it on real graph folders."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
from collections.abc import Callable

import pytest

from flowrl import notices, storage
from flowrl.errors import EXIT_BUSY
from flowrl.parallel.health import DaemonLock
from flowrl.parallel.state_file import StateFile
from flowrl.paths import GraphPaths
from tests.commands.repairing import flip, flowrl, fsck, statuses, version_file, write_ahead
from tests.experts.making import all_files, contents, make_expert
from tests.parallel.making import (
    PICKAXE,
    TABLE,
    WOOD,
    finish,
    frames,
    prepare,
    train,
)

Damage = Callable[[GraphPaths], object]


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


def half_written(layout: GraphPaths) -> None:
    part = layout.checkpoints / ".global_latest.json.0a.part"
    part.touch(mode=0o600)
    part.write_text("half")


def leave(*words: str) -> Damage:
    return lambda layout: make_expert(layout.root.joinpath(*words), "left")


def forget(layout: GraphPaths) -> None:
    """Another state says that expert 1 is another skill's."""
    StateFile(layout.scheduler_state).save(
        _renumbered(StateFile(layout.scheduler_state).load(), {WOOD: 1, TABLE: 0})
    )


def _renumbered(state, numbers):
    entries = [
        dataclasses.replace(entry, expert=numbers[entry.skill]) for entry in state.entries.values()
    ]
    return type(state).of(entries, next_expert=2)


DAMAGE: dict[str, tuple[Damage, str]] = {
    "an expert": (lambda g: flip(version_file(g, 0)), "error: expert 0 (Collect Wood)"),
    "the only version": (lambda g: flip(version_file(g, 1)), "error: expert 1 (Place Table)"),
    "a lost version": (
        lambda g: storage.remove_tree(version_file(g, 0).parents[1]),
        "is missing",
    ),
    "a linked array": (
        lambda g: (version_file(g, 0).unlink(), version_file(g, 0).symlink_to("/etc/passwd")),
        "d0 is a link to /etc/passwd",
    ),
    "a spare": (lambda g: flip(version_file(g, 0, 1)), "nothing uses it now"),
    "a lost spare": (
        lambda g: storage.remove_tree(version_file(g, 0, 1).parents[1]),
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
        lambda g: storage.copy_file(
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
    "a lost history": (
        lambda g: storage.remove_tree(g.history),
        "generation 3, which counts, is not in the history",
    ),
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
    assert "not repaired" not in said
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
    said = fsck(capsys, graph)[1]
    assert said.count("is lost") == said.count("is lost, and known to be") == 1


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


STRANGE = {
    "a padded generation": ("checkpoints/history", "0003.json"),
    "a generation in other digits": ("checkpoints/history", "\u0663.json"),
    "a run in other digits": ("training_runs", "skill_\u0667_X"),
    "a padded run": ("training_runs", "skill_007_X"),
    "a skill in other digits": ("skills", "\u0667_X"),
    "a version in other digits": (
        "skills/0_Collect_Wood/expert_0_policy",
        "v00000\u0669-x",
    ),
}


@pytest.mark.parametrize(("folder", "name"), STRANGE.values(), ids=STRANGE.keys())
def test_a_name_that_flowrl_would_not_give_is_nobody_s(graph, capsys, folder, name):
    storage.make_dir(graph.root / folder)
    (graph.root / folder / name).mkdir(mode=0o700)
    for flags in ((), ("--repair",)):
        code, said = fsck(capsys, graph, *flags)
        assert code == 0, said
        assert f"note: {name} is nothing that flowrl has made" in said
    rows = flowrl(capsys, "rollback", graph.root, "--json")[1]
    assert [row["generation"] for row in json.loads(rows)["history"]] == [1, 2, 3]


def test_a_name_does_nothing_to_the_terminal(graph, capsys):
    (graph.skills / "9_\x1b[2J\u202e\nerror: x").mkdir(mode=0o700)
    code, said = fsck(capsys, graph)
    assert code == 0
    assert r"note: 9_\x1b[2J\u202e error: x is nothing that flowrl has made" in said
    assert said.replace("\n", " ").isprintable()


def test_a_folder_in_the_place_of_a_notice_is_set_aside(graph, capsys):
    storage.make_dir(graph.notice("damage_expert_9"))
    assert "a notice cannot be read" in fsck(capsys, graph)[1]
    code, said = fsck(capsys, graph, "--repair")
    assert code == 0, said
    assert notices.read(graph) == {}


def test_a_run_s_lock_that_is_a_pipe_keeps_nobody_waiting(graph, capsys):
    ready = prepare(graph, PICKAXE, 2, {WOOD: 0, TABLE: 1})
    finish(ready.layout, {2: 5})
    ready.layout.lock.unlink(missing_ok=True)
    os.mkfifo(ready.layout.lock, mode=0o600)
    assert "has ended and is not merged" in fsck(capsys, graph)[1]


def test_nothing_is_repaired_while_a_scheduler_is_at_work(graph, capsys):
    half_written(graph)
    claim = DaemonLock(graph.daemon_lock)
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
