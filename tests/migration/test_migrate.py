"""A migrated graph is an ordinary one: whole, evaluated and trained on, or not there at all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from flowrl import checkpoints, cli, evaluate
from flowrl import config as configs
from flowrl.config import BottomUpConfig, PPOConfig
from flowrl.experts.store import ExpertStore
from flowrl.layout import GraphLayout, RunLayout
from flowrl.migration import report
from flowrl.migration.building import write_graph
from flowrl.models import dispatch
from flowrl.models.actor_critic import stack_experts
from flowrl.parallel.board import SchedulerState
from flowrl.parallel.known import known_skills
from flowrl.parallel.skill_book import SkillBook
from flowrl.parallel.training_setup import expected_shapes, prepare_training_run
from flowrl.runs import read_result, read_run
from flowrl.skills.graph import SkillGraph
from flowrl.skills.skill import load_library
from flowrl.skills.verdicts import VerdictStore
from tests.migration.old_graphs import (
    ACTIONS,
    NAMES,
    OBSERVATION,
    forward,
    pair,
    parallel_graph,
    planned,
    sequential_graph,
    skill_data,
    write_books,
    write_expert,
)

CLASSIC = "Craftax-Classic-Symbolic-v1"
CONFIG = PPOConfig(layer_size=8)


def migrate(old: Path, new: Path, *, dry_run: bool = False) -> None:
    assert report.run(old, new, dry_run=dry_run, as_json=True, activation=None) == 0


def snapshot(root: Path) -> dict[str, bytes]:
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def graph(tmp_path_factory) -> GraphLayout:
    """Three experts with gaps between them, one of which flowrl has no skill for."""
    folder = tmp_path_factory.mktemp("migrated")
    old = folder / "old"
    write_expert(old, 2, "Place Table", seed=2, frames=500)
    write_expert(old, 7, "Dance", seed=7, frames=None)
    write_expert(old, 11, "Collect Wood", seed=11, frames=900)
    write_books(old, {11: ("Collect Wood", skill_data())})
    before = snapshot(old)
    migrate(old, folder / "new")
    assert snapshot(old) == before
    return GraphLayout(folder / "new")


def test_every_expert_has_its_index_frames_and_lineage(graph):
    manifest = ExpertStore(graph).manifest()
    found = {i: (v.skill, v.frames) for i, v in manifest.experts.items()}
    assert found == {2: ("Place Table", 500), 7: ("Dance", 0), 11: ("Collect Wood", 900)}
    for version in manifest.experts.values():
        assert sum(part.frames for part in version.lineage) == version.frames
        assert {part.run_id for part in version.lineage} <= set(manifest.merged)


def test_every_version_is_whole_and_nothing_else_is_left(graph):
    store = ExpertStore(graph)
    for version in store.manifest().experts.values():
        store.verify(version)
    assert list(graph.training_runs.glob("*")) in ([], [graph.failed_runs])
    assert [p.name for p in graph.root.parent.iterdir() if p.name.startswith(".")] == []
    assert not [path for path in graph.root.rglob("*") if path.name.startswith(".tmp")]
    for path in [graph.root, *graph.root.rglob("*")]:
        assert path.stat().st_mode & 0o077 == 0


def test_fsck_finds_nothing_wrong(graph, capsys):
    assert cli.main(["fsck", str(graph.root)]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("index", [2, 7, 11])
def test_a_migrated_expert_computes_what_the_original_did(graph, index):
    rng = np.random.default_rng(0)
    rows = rng.normal(0, 1, (32, OBSERVATION)).astype(np.float32)
    actor, critic = pair(index)
    store = ExpertStore(graph)
    version = store.manifest().experts[index]
    like = checkpoints.like_of(expected_shapes(configs.to_json(CONFIG)))
    params = stack_experts([checkpoints.load_expert(store.verify(version), like)])
    logits, values = dispatch.apply(params, jnp.asarray(rows), jnp.zeros(len(rows), jnp.int32))
    assert logits.shape == (len(rows), ACTIONS)
    np.testing.assert_allclose(logits, forward(actor, rows), atol=2e-5)
    np.testing.assert_allclose(values, forward(critic, rows)[:, 0], atol=2e-5)


def test_the_arrays_are_the_originals_bit_for_bit(graph):
    store = ExpertStore(graph)
    like = checkpoints.like_of(expected_shapes(configs.to_json(CONFIG)))
    found = checkpoints.load_expert(store.verify(store.manifest().experts[11]), like)
    for part, layers in zip(("actor", "critic"), pair(11), strict=True):
        for ours, theirs in enumerate(layers.values()):
            for kind in ("kernel", "bias"):
                assert found[part][f"dense_{ours}"][kind].tobytes() == theirs[kind].tobytes()


def test_the_archive_reads_as_that_of_a_merged_run(graph):
    merged = ExpertStore(graph).manifest().merged
    for index, name in ((2, "Place Table"), (7, "Dance"), (11, "Collect Wood")):
        place = RunLayout(graph.skill_folder(index, name), index)
        run, result = read_run(place), read_result(place)
        assert run.run_id in merged
        assert result.run_id == run.run_id
        assert ("PLAN = [" in place.module.read_text()) == (name != "Dance")
    table = read_run(RunLayout(graph.skill_folder(2, "Place Table"), 2))
    assert [step.expert for step in table.plan] == [11, 2]
    assert [ancestor.expert for ancestor in table.ancestors] == [11]


def test_evaluate_loads_the_experts_of_a_plan(graph):
    store = ExpertStore(graph)
    run = read_run(evaluate.trained(store, "Place Table"))
    params = evaluate.load_experts(store, run)
    assert params["actor"]["dense_0"]["kernel"].shape == (2, OBSERVATION, 8)


@pytest.mark.slow
def test_a_migrated_skill_of_its_own_is_played(graph, capsys):
    words = ["evaluate", str(graph.root), "--skill", "Collect Wood", "--episodes", "2", "--json"]
    assert cli.main(words) == 0
    assert json.loads(capsys.readouterr().out)["episodes"] == 2


def test_evaluate_says_that_an_expert_without_a_skill_cannot_be_played(graph, capsys):
    assert cli.main(["evaluate", str(graph.root), "--skill", "Dance", "--episodes", "1"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "7.py" in line


def test_a_scheduler_takes_the_experts_up_as_completed(graph):
    skills = SkillBook(graph).over(load_library(CLASSIC))
    known = known_skills(graph, SkillGraph(skills.values()), SchedulerState())
    assert {(item.skill, item.expert) for item in known} >= {
        ("Collect Wood", 11),
        ("Place Table", 2),
        ("Dance", 7),
    }


def test_a_skill_that_needs_the_migrated_ones_can_be_prepared(graph, tmp_path):
    skills = SkillBook(graph).over(load_library(CLASSIC))
    ready = prepare_training_run(
        layout=graph,
        graph=SkillGraph(skills.values()),
        skill="Make Wood Pickaxe",
        expert=12,
        attempt=1,
        completed={"Collect Wood": 11, "Place Table": 2},
        config=CONFIG,
    )
    assert ready.run.experts == (2, 11, 12)
    assert {ancestor.frames for ancestor in ready.run.ancestors} == {500, 900}
    ready.run_folder.rename(tmp_path / "prepared")


def test_the_configuration_to_go_on_with_is_recorded(graph):
    facts = json.loads(graph.config_json.read_text())
    config = configs.from_json(BottomUpConfig, facts)
    assert (config.env_name, config.layer_size, config.activation) == (CLASSIC, 8, "tanh")
    assert config.graph_path == graph.root


def test_a_skill_of_its_own_has_a_verdict_to_be_trained_and_played_with(graph):
    run = read_run(RunLayout(graph.skill_folder(11, "Collect Wood"), 11))
    (verdict,) = run.verdicts
    assert VerdictStore(graph.verdicts).find(verdict.digest) == verdict


def test_a_skill_is_recorded_with_its_own_data(graph):
    recorded = SkillBook(graph).recorded()
    assert set(recorded) == {"Collect Wood", "Place Table"}
    assert "4 * n" in recorded["Collect Wood"].is_done


def test_a_sequential_graph_becomes_a_whole_graph(tmp_path):
    write_graph(planned(sequential_graph(tmp_path / "old")), tmp_path / "new")
    store = ExpertStore(GraphLayout(tmp_path / "new"))
    versions = store.manifest().experts
    assert {i: (v.skill, v.frames) for i, v in versions.items()} == {
        0: ("Collect Wood", 640),
        1: ("Place Table", 2000),
    }
    for version in versions.values():
        store.verify(version)


@pytest.mark.slow
def test_twelve_experts_become_a_whole_graph_each_with_its_own_numbers(tmp_path):
    old = tmp_path / "old"
    for index in range(12):
        write_expert(old, index, f"Skill {index}", seed=100 + index)
    migrate(old, tmp_path / "new")
    store = ExpertStore(GraphLayout(tmp_path / "new"))
    like = checkpoints.like_of(expected_shapes(configs.to_json(CONFIG)))
    for index, version in store.manifest().experts.items():
        found = checkpoints.load_expert(store.verify(version), like)
        kernel = pair(100 + index)[0]["layers_6"]["kernel"]
        np.testing.assert_array_equal(found["actor"]["dense_3"]["kernel"], kernel)


def test_a_dry_run_says_what_would_be_done_and_writes_nothing(tmp_path, capsys):
    parallel_graph(tmp_path / "old")
    before = snapshot(tmp_path)
    migrate(tmp_path / "old", tmp_path / "new", dry_run=True)
    facts = json.loads(capsys.readouterr().out)
    assert [(row["index"], row["skill"], row["playable"]) for row in facts["experts"]] == [
        (0, "library", True),
        (1, "library", True),
        (2, "library", True),
    ]
    assert facts["go_on"].startswith("python -m flowrl.bottomup_parallel --graph_path=")
    assert snapshot(tmp_path) == before
    assert not (tmp_path / "new").exists()


def test_the_table_names_every_expert_and_what_stays_behind(tmp_path, capsys):
    old = parallel_graph(tmp_path / "old")
    (old / "training_runs" / "skill_9_Busy").mkdir(parents=True)
    words = ["migrate", str(old), str(tmp_path / "new"), "--dry_run"]
    assert cli.main(words) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in NAMES)
    assert "left out: " in said
    assert "skill_9_Busy" in said
    assert "nothing is written" in said


@pytest.mark.parametrize("kind", ["folder", "file", "link", "inside", "around", "same"])
def test_a_place_that_is_taken_or_nested_is_refused_and_stays(kind, tmp_path, capsys):
    old = parallel_graph(tmp_path / "old", NAMES[:1])
    places = {"inside": old / "new", "around": tmp_path, "same": old}
    new = places.get(kind, tmp_path / "new")
    if kind == "folder":
        (new / "x").mkdir(parents=True)
    elif kind == "file":
        new.write_text("mine")
    elif kind == "link":
        new.symlink_to(tmp_path / "nowhere")
    before = snapshot(tmp_path)
    assert cli.main(["migrate", str(old), str(new)]) != 0
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert snapshot(tmp_path) == before


def test_an_empty_folder_may_be_named(tmp_path):
    (tmp_path / "new").mkdir()
    migrate(parallel_graph(tmp_path / "old", NAMES[:1]), tmp_path / "new")
    assert ExpertStore(GraphLayout(tmp_path / "new")).manifest().generation == 1


def test_a_refused_graph_leaves_no_trace_and_says_one_line(tmp_path, capsys):
    old = parallel_graph(tmp_path / "old", NAMES[:1])
    path = next(old.glob("skills/*/*/params.pkl"))
    path.write_bytes(path.read_bytes()[:-40])
    before = snapshot(tmp_path)
    assert cli.main(["migrate", str(old), str(tmp_path / "new")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert str(path) in line
    assert snapshot(tmp_path) == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["old"]


@pytest.mark.parametrize(
    "fault",
    [
        "migrate.finished:kill",
        pytest.param("prepare.built:kill", marks=pytest.mark.slow),
        pytest.param("commit.swapped:kill", marks=pytest.mark.slow),
        "merge.archived:raise",
        "migrate.built:kill",
        pytest.param("migrate.built:enospc", marks=pytest.mark.slow),
    ],
)
def test_a_migration_that_dies_leaves_no_graph_and_the_next_one_succeeds(fault, tmp_path):
    parallel_graph(tmp_path / "old", NAMES[:1])
    words = [sys.executable, "-m", "flowrl", "migrate", "old", "new"]
    env = os.environ | {"FLOWRL_FAULT": fault, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, check=False)
    assert done.returncode == (-signal.SIGKILL if fault.endswith("kill") else 1), done.stderr
    assert not (tmp_path / "new").exists()
    migrate(tmp_path / "old", tmp_path / "new")
    store = ExpertStore(GraphLayout(tmp_path / "new"))
    store.verify(store.manifest().experts[0])
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["new", "old"]
