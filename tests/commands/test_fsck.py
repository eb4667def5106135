"""flowrl fsck, as a user runs it on real graph folders."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable

import pytest

from flowrl import storage
from flowrl.errors import EXIT_BUSY
from flowrl.parallel.health import DaemonLock
from flowrl.parallel.state import StateFile
from flowrl.paths import GraphPaths, SweepPaths
from flowrl.tuning.sweep import create_sweep
from flowrl.tuning.trials import Sweep
from tests.commands.repairing import flip, flowrl, fsck, statuses, version_file, write_ahead
from tests.experts.making import all_files, contents, make_expert
from tests.machine import living
from tests.parallel.making import GRAPH, PICKAXE, TABLE, WOOD, frames, prepare, train
from tests.parallel.scheduling import state_of_entries
from tests.sealing import rewrite
from tests.tuning.making import a_record

Damage = Callable[[GraphPaths], object]


def test_a_whole_graph_is_clean_and_looking_changes_nothing(graph_paths, capsys):
    before = all_files(graph_paths.root)
    assert fsck(capsys, graph_paths) == (0, f"{graph_paths.root}: clean\n")
    code, said = fsck(capsys, graph_paths, "--json")
    assert (code, json.loads(said)["clean"], json.loads(said)["findings"]) == (0, True, [])
    assert all_files(graph_paths.root) == before


def test_a_folder_that_is_no_graph_is_refused(tmp_path, capsys):
    for command in ("fsck", "rollback", "recover"):
        code, said = flowrl(capsys, command, tmp_path)
        assert code == 1
        assert "is no graph" in said
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_a_sweep_is_refused_with_how_it_goes_on(graph_paths, capsys):
    sweep_paths = SweepPaths(graph_paths.sweeps / "s")
    create_sweep(Sweep(sweep_paths, a_record()), graph_paths, GRAPH)
    before = all_files(sweep_paths.root)
    for command in ("fsck", "rollback", "recover"):
        code, said = flowrl(capsys, command, sweep_paths.root)
        assert code == 2
        assert said.splitlines()[-1].endswith(f"flowrl sweep {graph_paths.root} --name s")
    assert all_files(sweep_paths.root) == before


def forget(graph_paths: GraphPaths) -> None:
    """Another state says that expert 1 is another skill's."""
    StateFile(graph_paths.scheduler_state).save(
        _renumbered(StateFile(graph_paths.scheduler_state).load(), {WOOD: 1, TABLE: 0})
    )


def _renumbered(state, numbers):
    entries = [
        dataclasses.replace(entry, expert=numbers[entry.skill]) for entry in state.entries.values()
    ]
    return state_of_entries(entries, next_expert=2)


DAMAGE: dict[str, tuple[Damage, str]] = {
    "an expert": (lambda g: flip(version_file(g, 0)), "error: expert 0 (Collect Wood)"),
    "the only version": (lambda g: flip(version_file(g, 1)), "error: expert 1 (Place Table)"),
    "a lost version": (lambda g: storage.remove_tree(version_file(g, 0).parents[1]), "is missing"),
    "a linked array": (
        lambda g: (version_file(g, 0).unlink(), version_file(g, 0).symlink_to("/etc/passwd")),
        "d0 is a link or a special file",
    ),
    "a spare": (lambda g: flip(version_file(g, 0, 1)), "nothing uses it now"),
    "a generation": (lambda g: flip(g.history / "2.json"), "history/2.json"),
    "the newest generation": (lambda g: flip(g.history / "3.json"), "history/3.json"),
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
    "a skill": (lambda g: flip(g.skill_file(WOOD)), "skill_files/Collect_Wood.json"),
    "the state": (lambda g: flip(g.scheduler_state), "scheduler_state.json is damaged"),
    "a lost state": (lambda g: g.scheduler_state.unlink(), "the scheduler's state is lost"),
    "swapped numbers": (forget, "expert 0 is Collect Wood; the state says Place Table"),
}


@pytest.mark.parametrize(("damage", "words"), DAMAGE.values(), ids=DAMAGE.keys())
def test_damage_is_named_then_repaired_once_and_for_all(graph_paths, capsys, damage, words):
    damage(graph_paths)
    code, said = fsck(capsys, graph_paths)
    assert code == 1, said
    assert any(words in line for line in said.splitlines()), said
    assert all(line.count("[") for line in said.splitlines()[:-1]), said
    remedy = rf"run flowrl fsck {graph_paths.root} --repair|flowrl recover {graph_paths.root}"
    assert all(len(re.findall(remedy, line)) == 1 for line in said.splitlines()[:-1]), said
    code, said = fsck(capsys, graph_paths, "--repair")
    assert code == 0, said
    assert "repair: " in said
    assert "not repaired" not in said
    again = all_files(graph_paths.root)
    code, said = fsck(capsys, graph_paths, "--repair")
    assert (code, all_files(graph_paths.root)) == (0, again), said
    contents(graph_paths)  # whole, all of them


def test_a_repair_removes_what_a_killed_merge_left(graph_paths, capsys):
    write_ahead(graph_paths)
    part = graph_paths.checkpoints / ".global_latest.json.0a.part"
    left = [
        graph_paths.expert_folder(0, WOOD) / name
        for name in (".tmp-x", "v000001-e0.0.trash", "v000004-dead")
    ]
    for folder in left:
        make_expert(folder, "left")
    part.write_text("half")
    assert fsck(capsys, graph_paths, "--repair")[0] == 0
    assert not any(path.exists() for path in (part, *left, graph_paths.history / "4.json"))
    storage.remove_tree(graph_paths.history)
    assert fsck(capsys, graph_paths, "--repair")[0] == 0
    assert (graph_paths.history / "3.json").exists()


def test_files_of_another_format_are_named_and_left_as_they_are(graph_paths, capsys):
    newer = [
        graph_paths.skill_folder(1, TABLE) / "run.json",
        graph_paths.skill_file(WOOD),
        graph_paths.history / "2.json",
    ]
    for path in newer:
        rewrite(path, lambda facts: facts.update(format=99))
    text = graph_paths.scheduler_state.read_text()
    graph_paths.scheduler_state.write_text(text.replace('"format": 1', '"format": 99'))
    code, said = fsck(capsys, graph_paths, "--repair")
    assert (code, said.count("has format 99")) == (1, 4), said
    assert all(path.exists() for path in (*newer, graph_paths.scheduler_state))
    before = all_files(graph_paths.root)
    for words in (("recover", graph_paths.root), ("rollback", graph_paths.root, 1)):
        assert flowrl(capsys, *words)[0] == 1
    assert all_files(graph_paths.root) == before
    rewrite(graph_paths.manifest, lambda facts: facts.update(format=99))
    assert "not repaired" in fsck(capsys, graph_paths, "--repair")[1]
    assert '"format": 99' in graph_paths.manifest.read_text()


def test_a_damaged_expert_is_what_it_was_before_and_the_damage_is_kept(graph_paths, capsys):
    broken = version_file(graph_paths, 0)
    flip(broken)
    content = broken.read_bytes()
    assert fsck(capsys, graph_paths, "--repair")[0] == 0
    assert frames(graph_paths) == {0: 50, 1: 20}
    aside = graph_paths.quarantine / broken.relative_to(graph_paths.root)
    assert aside.read_bytes() == content
    assert statuses(graph_paths) == {WOOD: "completed", TABLE: "completed"}
    assert fsck(capsys, graph_paths) == (0, f"{graph_paths.root}: clean\n")


def test_an_expert_without_a_whole_version_trains_again_as_the_same_number(graph_paths, capsys):
    flip(version_file(graph_paths, 1))
    code, said = fsck(capsys, graph_paths, "--repair")
    assert code == 0
    assert "its skill will be trained again" in said
    assert frames(graph_paths) == {0: 70}
    assert statuses(graph_paths) == {WOOD: "completed", TABLE: "waiting"}
    state = StateFile(graph_paths.scheduler_state).load()
    assert state is not None
    assert (state.entries[TABLE].expert, state.next_expert) == (1, 2)
    train(graph_paths, TABLE, 1, {WOOD: 0}, acted={1: 5})
    assert frames(graph_paths) == {0: 70, 1: 5}


def test_a_live_run_s_damaged_record_pins_all_until_its_folder_is_set_aside(graph_paths, capsys):
    ready = prepare(graph_paths, PICKAXE, 2, {WOOD: 0, TABLE: 1})
    flip(ready.run_paths.run_json)
    stale = make_expert(graph_paths.expert_version(0, WOOD, "v000001-stale"), "nobody's")
    with living(ready.run_paths):
        code, said = fsck(capsys, graph_paths, "--repair")
    assert code == 1
    assert "a process of this run lives" in said
    assert stale.is_dir()
    assert fsck(capsys, graph_paths, "--repair")[0] == 0
    assert not stale.exists()
    assert graph_paths.failed_run(2, PICKAXE, 0).is_dir()


@pytest.mark.parametrize(
    "place", ["requests", "approvals", "config.json", "training_runs/skill_2_X", "skills/0_Gone"]
)
@pytest.mark.parametrize("target", ["/nowhere", "itself"])
def test_a_link_that_leads_nowhere_is_named(graph_paths, capsys, place, target):
    link = graph_paths.root / place
    link.unlink(missing_ok=True)
    link.symlink_to(link if target == "itself" else target)
    code, said = fsck(capsys, graph_paths)
    assert (code, said.count(f"{link}]: ")) == (1, 1), said


def test_a_refused_repair_changes_nothing(graph_paths, capsys):
    """Not even who held the folder last; the lock is not made either."""
    (graph_paths.root / "daemon.lock").unlink(missing_ok=True)
    graph_paths.config_json.write_text("{")
    for words in (("rollback", 99), ("rollback", 3), ("rollback", 1), ("recover",)):
        if words == ("recover",):
            graph_paths.scheduler_state.unlink()
        before = all_files(graph_paths.root)
        assert flowrl(capsys, words[0], graph_paths.root, *words[1:])[0] in (1, 2)
        assert all_files(graph_paths.root) == before


STRANGE = {
    "a padded generation": ("checkpoints/history", "0003.json"),
    "a generation in other digits": ("checkpoints/history", "\u0663.json"),
    "a run in other digits": ("training_runs", "skill_\u0667_X"),
    "a padded run": ("training_runs", "skill_007_X"),
    "a skill in other digits": ("skills", "\u0667_X"),
    "a version in other digits": ("skills/0_Collect_Wood/expert_0_policy", "v00000\u0669-x"),
}


@pytest.mark.parametrize(("folder", "name"), STRANGE.values(), ids=STRANGE.keys())
def test_a_name_that_flowrl_would_not_give_is_nobody_s(graph_paths, capsys, folder, name):
    storage.make_dir(graph_paths.root / folder)
    (graph_paths.root / folder / name).mkdir(mode=0o700)
    for flags in ((), ("--repair",)):
        code, said = fsck(capsys, graph_paths, *flags)
        assert code == 0, said
        assert (graph_paths.root / folder / name).is_dir()
    rows = flowrl(capsys, "rollback", graph_paths.root, "--json")[1]
    assert [row["generation"] for row in json.loads(rows)["history"]] == [1, 2, 3]


def test_nothing_is_repaired_while_a_scheduler_is_at_work(graph_paths, capsys):
    write_ahead(graph_paths)
    flip(graph_paths.scheduler_state)
    claim = DaemonLock(graph_paths.daemon_lock)
    claim.acquire()
    before = all_files(graph_paths.root)
    for words in (("fsck", graph_paths.root, "--repair"), ("rollback", graph_paths.root, 2)):
        code, said = flowrl(capsys, *words)
        assert code == EXIT_BUSY
        assert f"process {os.getpid()} on" in said
    assert flowrl(capsys, "recover", graph_paths.root)[0] == EXIT_BUSY
    assert all_files(graph_paths.root) == before
    assert fsck(capsys, graph_paths)[1].endswith("clean\n"), "it is writing its state"
    claim.release()
    assert fsck(capsys, graph_paths)[0] == 1
