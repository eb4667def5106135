"""A game on two devices and on one, trained by the program that users call."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from flowrl.command_line import to_argv
from flowrl.config import PPOConfig
from flowrl.errors import ComparingError
from flowrl.evaluation import evaluate
from flowrl.experts import checkpoint
from flowrl.experts.merge import MERGE_RULES, MergeRule
from flowrl.games.base import find_game
from flowrl.parallel import comparisons
from flowrl.parallel.training_processor import process_completed_training
from flowrl.parallel.training_setup import prepare_training_run
from flowrl.paths import GraphPaths, RunPaths
from flowrl.runs import TrainingRun, read_result
from tests.games.installing import graph_of, shapes_in
from tests.waiting import limit

SKILLS = {"Tiny-v1": "Pick Berry", "Craftax-Classic-Symbolic-v1": "Collect Sapling"}
GAMES = [*SKILLS][:1] + [pytest.param(name, marks=pytest.mark.slow) for name in [*SKILLS][1:]]
CONFIG = PPOConfig(
    total_timesteps=6 * 8 * 16,
    num_envs=8,
    env_shards=2,
    num_steps=16,
    num_minibatches=2,
    update_epochs=2,
    max_task_steps=4,
    success_state_rate=1.0,
    coverage_bonus=0.0,
)
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module", params=GAMES)
def graph(request, tiny_game, tmp_path_factory):
    """A graph, and two runs from its expert and the same random numbers, on one device and two."""
    graph_paths = GraphPaths(tmp_path_factory.mktemp("devices") / "graph")
    skill, config = SKILLS[request.param], replace(CONFIG, env_name=request.param)
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    env = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}

    def trained(attempt: int, devices: int):
        ready = prepare_training_run(
            graph_paths=graph_paths,
            graph=graph_of(graph_paths, skill, config.env_name),
            skill=skill,
            expert=0,
            attempt=attempt,
            completed={},
            config=config,
        )
        same = 7 - attempt  # an attempt adds to the seed
        own = replace(config, num_devices=devices, acting_threads=1, seed=same)
        module = ("--module_path", str(ready.run_paths.module))
        command = (sys.executable, "-m", "flowrl.ppo_flow", *module, *to_argv(own))
        subprocess.run(command, env=env, check=True, timeout=limit(540))
        return ready

    def put_aside(attempt: int, devices: int):
        ready = trained(attempt, devices)
        kept = graph_paths.root.with_name(f"on {devices}")  # an expert's runs have one folder
        ready.run_folder.rename(kept)
        return ready, kept

    process_completed_training(trained(1, 1).run_folder, skill, 0, graph_paths.root)
    return graph_paths, (put_aside(2, 1), put_aside(3, 2))


def test_two_devices_train_what_one_trains(graph):
    _, runs = graph
    places = [RunPaths(kept, 0) for _, kept in runs]
    results = [read_result(run_paths) for run_paths in places]
    assert len({result.run_id for result in results}) == 2
    assert results[0].updates == results[1].updates == 6
    assert results[0].mean_episode_length == results[1].mean_episode_length
    game = find_game(runs[0][0].run.config["env_name"])
    like = checkpoint.like_of(shapes_in(game, CONFIG.layer_size))
    trees = (checkpoint.load_expert(run_paths.final(0), like) for run_paths in places)
    pairs = list(zip(*map(jax.tree.leaves, trees), strict=True))
    apart = max(np.abs(one - other).max() for one, other in pairs)
    assert apart <= min(1e-5, 5e-6 * max(np.abs(one).max() for one, _ in pairs))


RULES = ["frame_count", "frame_average", pytest.param("eval_gate", marks=pytest.mark.slow)]


WHY = {
    "frame_count": "frames, the run's has",
    "frame_average": "averaged, 50%",
    "eval_gate": "not better",
}


@pytest.mark.parametrize("policy", RULES)
def test_their_experts_are_merged_and_evaluated_on_one_device(graph, tmp_path, policy):
    graph_paths, runs = graph
    shutil.copytree(graph_paths.root, tmp_path / "graph")
    graph_paths = GraphPaths(tmp_path / "graph")
    for ready, kept in runs:
        place = graph_paths.root / ready.run_folder.relative_to(graph[0].root)
        shutil.copytree(kept, place)
        done = merged_at_last(graph_paths, place, ready.run, MERGE_RULES[policy])
        assert not done["already_merged"]
    assert WHY[policy] in done["experts"][0]["why"]
    if policy == "frame_average":
        assert evaluate(graph_paths, ready.run.skill, episodes=8, seed=1)[0].generation == 3


def merged_at_last(graph_paths: GraphPaths, place: Path, run: TrainingRun, rule: MergeRule) -> dict:
    while True:
        try:
            return process_completed_training(
                place, run.skill, 0, graph_paths.root, merge_policy=rule
            )
        except ComparingError:
            begun = comparisons.LAUNCHED[graph_paths.comparisons / run.run_id]
            comparisons.LAUNCHER.wait([begun], timeout_seconds=1.0)
