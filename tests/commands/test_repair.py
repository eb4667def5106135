"""flowrl rollback and recover, as a user runs them on real graph folders."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from flowrl.config import PPOConfig
from flowrl.experts.store import ExpertStore
from flowrl.parallel.recovery import recorded_config
from flowrl.parallel.skill_sources import record_graph
from flowrl.parallel.state import StateFile
from flowrl.parallel.status import FRESH, Running
from flowrl.parallel.training_setup import fail_run
from tests.commands.repairing import flip, flowrl, fsck, statuses, version_file
from tests.experts.making import all_files
from tests.parallel.making import PICKAXE, SWORD, TABLE, WOOD, finish, frames, merge, prepare, train
from tests.sealing import rewrite

# --- rollback


def test_the_generations_are_listed_with_what_each_merged(graph_paths, capsys):
    code, said = flowrl(capsys, "rollback", graph_paths.root)
    assert code == 0
    rows = [line for line in said.splitlines() if line[:1].isdigit()]
    merged = ExpertStore(graph_paths).manifest().merged
    assert [run_id in row for run_id, row in zip(merged, rows, strict=True)] == [True] * 3
    assert "(Place Table)" in rows[1]
    assert "generation 3 counts now" in said
    (graph_paths.history / "1.json").write_text("{")
    facts = json.loads(flowrl(capsys, "rollback", graph_paths.root, "--json")[1])
    assert [row["generation"] for row in facts["history"]] == [2, 3]
    assert facts["generation"] == 3


def test_after_a_rollback_completed_means_that_an_expert_counts(graph_paths, capsys):
    merged = ExpertStore(graph_paths).manifest().merged
    code, said = flowrl(capsys, "rollback", graph_paths.root, 1)
    assert code == 0
    assert "is made anew (1 completed, 1 waiting)" in said
    assert frames(graph_paths) == {0: 50}
    assert ExpertStore(graph_paths).manifest().merged == merged
    assert statuses(graph_paths) == {WOOD: "completed", TABLE: "waiting"}
    assert fsck(capsys, graph_paths)[0] == 0
    assert flowrl(capsys, "rollback", graph_paths.root, 3)[0] == 0
    assert frames(graph_paths) == {0: 70, 1: 20}
    assert statuses(graph_paths) == {WOOD: "completed", TABLE: "completed"}
    assert fsck(capsys, graph_paths)[0] == 0


def test_a_merged_skill_that_still_waits_is_a_fault(graph_paths, capsys):
    assert flowrl(capsys, "rollback", graph_paths.root, 1)[0] == 0
    state = graph_paths.scheduler_state.read_bytes()
    assert flowrl(capsys, "rollback", graph_paths.root, 3)[0] == 0
    graph_paths.scheduler_state.write_bytes(state)  # as if it was killed before it wrote the state
    assert "Place Table has merged expert 1, but is waiting" in fsck(capsys, graph_paths)[1]


def test_a_rollback_that_was_killed_before_the_state_is_found_and_ended(
    graph_paths, capsys, monkeypatch
):
    state = graph_paths.scheduler_state.read_bytes()
    assert flowrl(capsys, "rollback", graph_paths.root, 1)[0] == 0
    graph_paths.scheduler_state.write_bytes(state)
    code, said = fsck(capsys, graph_paths)
    assert code == 1
    assert "Place Table is completed, but no expert of it is in the manifest" in said
    assert fsck(capsys, graph_paths, "--repair")[0] == 0
    assert statuses(graph_paths)[TABLE] == "waiting"


def test_a_start_after_a_repair_that_was_killed_names_the_remedy(graph_paths, capsys):
    state = graph_paths.scheduler_state.read_bytes()
    flip(version_file(graph_paths, 1))
    assert "trained again" in fsck(capsys, graph_paths, "--repair")[1]
    graph_paths.scheduler_state.write_bytes(state)  # as if it was killed before it wrote the state
    code, said = flowrl(capsys, "train", graph_paths.root)
    assert code == 1, said
    assert (
        f"no expert of Place Table counts any more; run flowrl recover {graph_paths.root}" in said
    )
    assert flowrl(capsys, "recover", graph_paths.root)[0] == 0
    assert statuses(graph_paths)[TABLE] == "waiting"


def test_a_dependants_copy_that_replaces_a_continuation_is_no_damage(graph_paths, capsys):
    dependant = prepare(graph_paths, PICKAXE, 2, {WOOD: 0, TABLE: 1})
    train(graph_paths, WOOD, 0, {}, acted={0: 10})
    assert "has another expert than that of run" in fsck(capsys, graph_paths)[1]
    assert flowrl(capsys, "recover", graph_paths.root)[0] == 0
    finish(dependant.run_paths, {0: 30, 1: 0, 2: 5})
    merge(graph_paths, dependant)
    assert frames(graph_paths)[0] == 100, "the copy of the version before counts"
    assert fsck(capsys, graph_paths) == (0, f"{graph_paths.root}: clean\n")
    assert flowrl(capsys, "rollback", graph_paths.root, 3)[0] == 0
    assert statuses(graph_paths)[WOOD] == "completed"
    state = StateFile(graph_paths.scheduler_state).load()
    assert state.entries[WOOD].status.run_id == ExpertStore(graph_paths).manifest().merged[2]


def test_a_continuation_that_is_merged_and_not_yet_in_the_state_is_no_damage(graph_paths, capsys):
    state = StateFile(graph_paths.scheduler_state).load()
    entry = state.entries[WOOD]
    training = replace(entry, trained=entry.status, status=FRESH)
    state = replace(state, entries={**state.entries, WOOD: training})
    StateFile(graph_paths.scheduler_state).save(state)
    train(graph_paths, WOOD, 0, {}, acted={0: 10})
    assert fsck(capsys, graph_paths) == (0, f"{graph_paths.root}: clean\n")


@pytest.mark.parametrize(
    ("generation", "words"), [(3, "counts now"), (9, "choose among 1, 2")], ids=str
)
def test_a_rollback_to_nowhere_is_refused(graph_paths, capsys, generation, words):
    before = all_files(graph_paths.root)
    code, said = flowrl(capsys, "rollback", graph_paths.root, generation)
    assert code == 2
    assert words in said
    assert all_files(graph_paths.root) == before


# --- recover


def test_a_damaged_state_is_made_anew_and_kept(graph_paths, capsys):
    whole = StateFile(graph_paths.scheduler_state).load()
    for name in ("scheduler_state.json", "scheduler_state.json.1"):
        flip(graph_paths.scheduler_state)
        damaged = graph_paths.scheduler_state.read_bytes()
        code, said = flowrl(capsys, "recover", graph_paths.root)
        assert code == 0
        assert "(2 completed)" in said
        kept = graph_paths.quarantine / name
        assert kept.read_bytes() == damaged
        assert str(graph_paths.quarantine) in said
    assert StateFile(graph_paths.scheduler_state).load() == whole


def test_a_lost_state_is_made_anew_and_none_is_kept(graph_paths, capsys):
    graph_paths.scheduler_state.unlink()
    code, said = flowrl(capsys, "recover", graph_paths.root)
    assert (code, said) == (0, f"{graph_paths.scheduler_state} is made anew (2 completed)\n")


@pytest.mark.parametrize("key", ["env_name", "num_envs"])
def test_a_configuration_that_makes_no_sense_is_named(graph_paths, capsys, key):
    rewrite(graph_paths.config_json, lambda facts: facts.update({key: "Nope"}))
    code, said = fsck(capsys, graph_paths)
    assert code == 1
    assert said.startswith(f"warning: {graph_paths.config_json} ")
    graph_paths.scheduler_state.unlink()
    code, said = flowrl(capsys, "recover", graph_paths.root)
    assert code == 1
    assert "start the scheduler with the flags it began with" in said


@pytest.mark.parametrize("content", [None, "{", '{"format": 1}'], ids=["none", "torn", "no seal"])
def test_without_its_configuration_a_graph_is_what_its_record_says(graph_paths, capsys, content):
    """A scheduler that is killed before its first run leaves no config.json."""
    graph_paths.graph_json.unlink()
    record_graph(graph_paths, PPOConfig(env_name="Craftax-Classic-Symbolic-v1", layer_size=32))
    graph_paths.config_json.unlink()
    if content is not None:
        graph_paths.config_json.write_text(content)
        assert fsck(capsys, graph_paths)[1].startswith("warning: ")
        assert fsck(capsys, graph_paths, "--repair")[0] == 0
    ppo = recorded_config(graph_paths).ppo
    assert (ppo.env_name, ppo.layer_size) == ("Craftax-Classic-Symbolic-v1", 32)
    flip(graph_paths.scheduler_state)
    code, said = flowrl(capsys, "recover", graph_paths.root)
    assert (code, "(2 completed)" in said) == (0, True), said


def test_a_whole_state_is_not_touched(graph_paths, capsys):
    before = graph_paths.scheduler_state.read_bytes()
    code, said = flowrl(capsys, "recover", graph_paths.root)
    assert (code, graph_paths.scheduler_state.read_bytes()) == (0, before)
    assert "is whole: there is nothing to recover" in said


def test_live_runs_are_taken_up_and_no_number_is_given_twice(graph_paths, capsys):
    ready = prepare(graph_paths, PICKAXE, 5, {WOOD: 0, TABLE: 1})
    prepare(graph_paths, SWORD, 8, {WOOD: 0, TABLE: 1})
    fail_run(graph_paths, 8, SWORD)
    assert flowrl(capsys, "rollback", graph_paths.root, 1)[0] == 0
    graph_paths.scheduler_state.unlink()
    code, said = flowrl(capsys, "recover", graph_paths.root, "--json")
    assert code == 0
    assert "(1 completed, 1 running, 2 waiting)" in json.loads(said)["state"]
    state = StateFile(graph_paths.scheduler_state).load()
    assert state is not None
    assert {entry.skill: (entry.status.kind, entry.expert) for entry in state.entries.values()} == {
        WOOD: ("completed", 0),
        TABLE: ("waiting", 1),
        PICKAXE: ("running", 5),
        SWORD: ("waiting", 8),
    }
    assert state.next_expert == 9
    status = state.entries[PICKAXE].status
    assert isinstance(status, Running)
    assert (status.run_id, status.handle) == (ready.run.run_id, None)


def test_a_lost_record_costs_a_success_rate_and_no_expert(graph_paths, capsys, caplog):
    flip(graph_paths.skill_folder(1, TABLE) / "result.json")
    graph_paths.scheduler_state.unlink()
    assert flowrl(capsys, "recover", graph_paths.root)[0] == 0
    assert statuses(graph_paths) == {WOOD: "completed", TABLE: "completed"}
    assert "record of" in caplog.text


def test_a_run_that_was_merged_and_not_archived_is_completed(graph_paths, capsys, monkeypatch):
    ready = prepare(graph_paths, PICKAXE, 2, {WOOD: 0, TABLE: 1})
    finish(ready.run_paths, {2: 5})
    monkeypatch.setenv("FLOWRL_FAULT", "merge.committed:raise")
    with pytest.raises(OSError, match="injected"):
        merge(graph_paths, ready)
    monkeypatch.delenv("FLOWRL_FAULT")
    assert fsck(capsys, graph_paths)[0] == 0
    graph_paths.scheduler_state.unlink()
    assert flowrl(capsys, "recover", graph_paths.root)[0] == 0
    assert statuses(graph_paths)[PICKAXE] == "completed"
