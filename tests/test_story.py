"""The whole story as a user runs it: real Craftax-Classic, real trainers, real tmux."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from flowrl import bottomup, cli
from flowrl.envs.skill_module import load_module
from flowrl.experts.store import ExpertStore
from flowrl.launchers.tmux import TmuxLauncher
from flowrl.paths import GraphPaths, RunPaths
from flowrl.runs import read_run
from tests.parallel.faults import killed_at
from tests.waiting import limit, until

TINY = (
    "--num_envs=16",
    "--num_steps=16",
    "--num_minibatches=4",
    "--update_epochs=1",
    "--total_timesteps=2048",
    "--max_task_steps=40",
    "--success_state_rate=0",
    "--needs_success_rate=0",
    "--min_success_rate=0",
)
SKILLS = {"Collect Wood": 0, "Place Table": 1}
DEADLINE_SECONDS = limit(280.0)


@pytest.fixture(scope="module")
def socket(tmp_path_factory):
    """A tmux server of our own; it ends with the tests."""
    path = tmp_path_factory.mktemp("tmux") / "socket"
    yield str(path)
    TmuxLauncher(str(path)).server.run("kill-server")


@pytest.fixture(scope="module")
def graph_paths(tmp_path_factory, socket):
    """Two real skills, trained side by side in sessions by the documented command."""
    root = tmp_path_factory.mktemp("story") / "graph"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "flowrl.bottomup_parallel", "--graph-path", str(root)),
            *("--target_skill", "Place Table", "--max_parallel_skills", "2"),
            *("--tmux_socket", socket, "--no_use_wandb", *TINY),
        ],
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return GraphPaths(root)


def archives(graph_paths):
    for skill, expert in SKILLS.items():
        yield skill, RunPaths(graph_paths.skill_folder(expert, skill), expert)


@pytest.mark.craftax
@pytest.mark.tmux
def test_both_skills_are_trained_and_merged(graph_paths, socket, capsys):
    assert cli.main(["status", str(graph_paths.root), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["ended"]
    assert {row["skill"]: row["expert"] for row in facts["skills"]} == SKILLS
    assert {row["status"] for row in facts["skills"]} == {"completed"}
    assert all(0 < row["frames"] <= 2048 for row in facts["skills"])
    assert list(graph_paths.training_runs.glob("skill_*")) == []
    until(lambda: not TmuxLauncher(socket).server.panes(), what="the end of its sessions")


@pytest.mark.craftax
@pytest.mark.tmux
@pytest.mark.parametrize(
    ("flag", "was", "now"),
    [
        ("layer_size", "64", "32"),
        ("activation", "tanh", "relu"),
        ("env_name", "Craftax-Classic-Symbolic-v1", "Craftax-Symbolic-v1"),
    ],
)
def test_a_graph_is_not_trained_on_with_other_networks_or_games(
    graph_paths, capsys, flag, was, now
):
    before = {path: path.stat().st_mtime_ns for path in graph_paths.root.rglob("*")}
    assert bottomup.main(["--graph-path", str(graph_paths.root), f"--{flag}={now}"]) == 2
    said = capsys.readouterr().err
    assert f"was begun with --{flag} {was}, not --{flag} {now}" in said
    assert {path: path.stat().st_mtime_ns for path in graph_paths.root.rglob("*")} == before


@pytest.mark.craftax
@pytest.mark.tmux
def test_every_archive_holds_what_the_expert_was_trained_on(graph_paths, capsys):
    for skill, archive in archives(graph_paths):
        module = load_module(archive.module)
        assert module.tasks[-1].skill == skill
        assert cli.main(["logs", skill, "--graph-path", str(graph_paths.root)]) == 0
        log = capsys.readouterr().out
        assert skill in log
        assert "\x1b" not in log
        updates = [json.loads(line)["updates"] for line in archive.metrics.read_text().splitlines()]
        assert updates == sorted(updates)


@pytest.mark.craftax
@pytest.mark.tmux
def test_the_merged_experts_can_be_evaluated(graph_paths, capfd):
    words = [
        "evaluate",
        str(graph_paths.root),
        "--skill",
        "Place Table",
        "--episodes",
        "16",
        "--json",
    ]
    assert cli.main(words) == 0
    found = json.loads(capfd.readouterr().out)
    assert [step["skill"] for step in found["steps"]] == list(SKILLS)
    assert [step["expert"] for step in found["steps"]] == list(SKILLS.values())
    assert all(0 <= step["low"] <= step["success_rate"] <= 1 for step in found["steps"])
    assert 0 < found["mean_episode_length"] <= 40 * len(SKILLS)


@pytest.mark.craftax
@pytest.mark.tmux
@pytest.mark.slow
def test_the_merged_experts_episodes_can_be_judged(graph_paths, capfd):
    words = ["judge", str(graph_paths.root), "Collect Wood", "--episodes", "64", "--json"]
    assert cli.main(words) == 0
    measured = json.loads(capfd.readouterr().out)["learned"]["calibration"]
    assert 0 < measured["answered"] == measured["asked"] <= 16


def test_one_after_another_and_then_on_over_a_killed_scheduler(tmp_path, tiny_game, capsys):
    root = tmp_path / "graph"
    words = ["--graph_path", str(root), f"--env_name={tiny_game.name}", *TINY]
    words += ["--target_skill", "Pick Berry"]
    words[words.index("--max_task_steps=40")] = "--max_task_steps=1"  # with hardly any success
    assert bottomup.main(words) == 0
    capsys.readouterr()
    assert cli.main(["status", str(root), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["skills"]
    assert (row["skill"], row["status"], row["expert"]) == ("Pick Berry", "completed", 0)
    before = GraphPaths(root).manifest.read_bytes()
    assert bottomup.main(words) == 0
    assert GraphPaths(root).manifest.read_bytes() == before, "it was trained already"
    (first,) = ExpertStore(GraphPaths(root)).manifest().experts.values()
    assert cli.main(["train-more", str(root), "Pick Berry", "--total_timesteps=512"]) == 0
    words[words.index("--max_task_steps=1")] = "--max_task_steps=40"
    assert killed_at("scheduler.launched", "flowrl.bottomup", *words)
    assert bottomup.main(words) == 0
    (line,) = json.loads(GraphPaths(root).scheduler_state.read_text())["skills"]
    (now,) = ExpertStore(GraphPaths(root)).manifest().experts.values()
    assert now.lineage[0] == first.lineage[0]
    assert [entry.run_id for entry in now.lineage[1:]] == [line["run_id"]]
    assert now.frames == sum(entry.frames for entry in now.lineage) == first.frames + 512
    assert read_run(GraphPaths(root).archive(0, "Pick Berry")).ancestors == (first,)
    assert list(GraphPaths(root).training_runs.glob("skill_*")) == []
