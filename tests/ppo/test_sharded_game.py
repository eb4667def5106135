"""The real game on two devices and on one, trained by the program that users call."""

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

from flowrl.config import PPOConfig, to_argv
from flowrl.errors import ComparingError
from flowrl.evaluate import evaluate
from flowrl.experts import checkpoint
from flowrl.experts.merge import MERGE_RULES, MergeRule
from flowrl.parallel import comparisons
from flowrl.parallel.training_processor import process_completed_training
from flowrl.parallel.training_setup import prepare_training_run
from flowrl.paths import GraphPaths
from flowrl.runs import expert_shapes, read_result
from flowrl.skills.graph import SkillGraph
from tests.parallel.making import LIBRARY
from tests.waiting import limit

SAPLING = "Collect Sapling"
CONFIG = PPOConfig(
    total_timesteps=6 * 8 * 16,
    num_envs=8,
    env_shards=2,
    num_steps=16,
    num_minibatches=2,
    update_epochs=2,
    max_task_steps=32,
    success_state_rate=1.0,
)
pytestmark = [pytest.mark.craftax, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    """A graph with two finished runs from the same random numbers, on one device and on two."""
    layout = GraphPaths(tmp_path_factory.mktemp("devices") / "graph")
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    env = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}

    def trained(devices: int):
        ready = prepare_training_run(
            layout=layout,
            graph=SkillGraph([LIBRARY[SAPLING]]),
            skill=SAPLING,
            expert=0,
            attempt=devices,
            completed={},
            config=CONFIG,
        )
        same = 7 - devices  # an attempt adds to the seed
        own = replace(CONFIG, num_devices=devices, acting_threads=1, seed=same)
        module = ("--module_path", str(ready.layout.module))
        command = (sys.executable, "-m", "flowrl.ppo_flow", *module, *to_argv(own))
        subprocess.run(command, env=env, check=True, timeout=limit(540))
        return ready

    return layout, (trained(1), trained(2))


def experts_of(run) -> list[np.ndarray]:
    like = checkpoint.like_of(expert_shapes(1345, 17, CONFIG.layer_size))
    tree = checkpoint.load_expert(run.layout.final(0), like)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def test_two_devices_train_what_one_trains(graph):
    _, runs = graph
    for one, other in zip(*map(experts_of, runs), strict=True):
        assert np.abs(one - other).max() <= min(1e-5, 5e-6 * np.abs(one).max())
    results = [read_result(run.layout) for run in runs]
    assert results[0].updates == results[1].updates == 6
    assert results[0].mean_episode_length == results[1].mean_episode_length


RULES = ["frame_count", "frame_average", pytest.param("eval_gate", marks=pytest.mark.slow)]


@pytest.mark.parametrize("policy", RULES)
def test_their_experts_are_merged_and_evaluated_on_one_device(graph, tmp_path, policy):
    layout, runs = graph
    shutil.copytree(layout.root, tmp_path / "graph")
    layout = GraphPaths(tmp_path / "graph")
    for ready in runs:
        place = layout.root / ready.run_folder.relative_to(graph[0].root)
        done = merged_at_last(layout, place, ready.run.run_id, MERGE_RULES[policy])
    assert set(done["experts"]) == {0}
    if policy == "frame_average":
        assert done["experts"][0]["verdict"] == "take", done
        report = evaluate(layout, SAPLING, episodes=8, seed=1)
        assert report.generation == 1


def merged_at_last(layout: GraphPaths, place: Path, run_id: str, rule: MergeRule) -> dict:
    while True:
        try:
            return process_completed_training(place, SAPLING, 0, layout.root, merge_policy=rule)
        except ComparingError:
            begun = comparisons._launched[layout.comparisons / run_id]
            comparisons.LAUNCHER.wait([begun], timeout_seconds=1.0)
