"""Trainers side by side take the CPUs that there are, and no more."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from flowrl import command_line
from flowrl.config import BottomUpConfig, PPOConfig
from flowrl.launchers import sandbox
from flowrl.parallel.events import RunRequest
from flowrl.parallel.training import SequentialConfig
from flowrl.parallel.training_backend import TrainingBackend
from flowrl.paths import GraphPaths
from flowrl.runs import TrainConfig, threads_for
from flowrl.skills.graph import SkillGraph
from flowrl.skills.skill import load_library

WOOD = "Collect Wood"
GRAPH = SkillGraph(load_library(PPOConfig().env_name).values())


@pytest.fixture(autouse=True)
def four_cpus(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(sandbox, "problem_of", lambda _: None)  # a trial for each case takes long


def trainer(folder, *words, kind=BottomUpConfig, **facts) -> TrainConfig:
    """What the trainer's command line says."""
    parsed = command_line.parse(kind, words)
    backend = TrainingBackend(GraphPaths(folder), parsed, GRAPH)
    job = backend.prepare(RunRequest(skill=WOOD, expert=0, attempt=1, **facts))
    return TrainConfig.read(job.argv[3:], prog="ppo_flow")


@pytest.mark.parametrize(
    ("words", "threads"),
    [
        ("--max_parallel_skills=2", 2),
        ("--max_parallel_skills=2 --num_envs=256", 2),
        ("--max_parallel_skills=3", 1),
        ("--max_parallel_skills=9", 1),
        ("--max_parallel_skills=1 --num_envs=256", 4),
        ("--max_parallel_skills=9 --max_nodes=1 --num_envs=256", 4),
        ("--max_parallel_skills=1 --num_envs=96", 3),
        ("--max_parallel_skills=1 --num_envs=48", 1),
        ("--cpus_per_run=2 --max_parallel_skills=9", 2),
        ("--cpus_per_run=1 --max_parallel_skills=1", 1),
        ("--acting_threads=4 --max_parallel_skills=9", 4),
        ("--acting_threads=1 --max_parallel_skills=1", 1),
        ("--replicas=2 --max_parallel_skills=1 --num_envs=256", 2),
    ],
)
def test_a_run_takes_its_share_of_the_cpus(tmp_path, words, threads):
    assert trainer(tmp_path, *words.split()).ppo.acting_threads == threads


def test_runs_one_after_another_have_all_cpus(tmp_path):
    found = trainer(tmp_path, "--num_envs=128", kind=SequentialConfig)
    assert found.ppo.acting_threads == 4


def test_a_resumed_run_shares_the_cpus_as_they_are_now(tmp_path):
    def backend(*words):
        parsed = command_line.parse(BottomUpConfig, ["--num_envs=128", *words])
        return TrainingBackend(GraphPaths(tmp_path), parsed, GRAPH)

    task = RunRequest(skill=WOOD, expert=0, attempt=1)
    first = backend("--max_parallel_skills=4").prepare(task)
    assert TrainConfig.read(first.argv[3:], prog="ppo_flow").ppo.acting_threads == 1
    again = backend("--max_parallel_skills=2").reopen(
        RunRequest(skill=WOOD, expert=0, attempt=1, run_id=first.run_id)
    )
    assert again is not None
    assert TrainConfig.read(again.argv[3:], prog="ppo_flow").ppo.acting_threads == 2


def test_a_run_with_a_gpu_is_told_nothing_of_threads(tmp_path):
    assert trainer(tmp_path, "--max_parallel_skills=4", devices=("0",)).ppo.acting_threads is None


@pytest.mark.parametrize(
    ("words", "threads"),
    [("--num_envs=96", 2), ("--num_envs=128", 4), ("--num_envs=128 --max_parallel_skills=4", 1)],
)
@pytest.mark.parametrize("devices", [0, 2])
def test_several_devices_of_the_cpu_have_as_many_threads_each(
    tmp_path, monkeypatch, words, threads, devices
):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    words = ["--max_parallel_skills=1", *words.split(), f"--num_devices={devices}"]
    found = trainer(tmp_path, *words).ppo
    assert (found.num_devices, found.acting_threads) == (devices, threads)
    replace(found, num_devices=2).check()


def test_a_run_on_another_platform_is_told_nothing_of_threads(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "tpu,cpu")
    assert trainer(tmp_path, "--max_parallel_skills=4").ppo.acting_threads is None


@pytest.mark.parametrize("num_envs", [1, 31, 32, 48, 63, 64, 96, 100, 256, 1000, 4096])
@pytest.mark.parametrize("cpus", [0, 1, 2, 3, 7, 64])
@pytest.mark.parametrize("devices", [1, 2, 4])
def test_threads_share_the_environments_evenly_in_groups_that_pay(num_envs, cpus, devices):
    config = PPOConfig(num_envs=num_envs, num_devices=devices, num_minibatches=64)
    threads = threads_for(config, cpus)
    assert 1 <= threads <= max(1, cpus)
    assert threads == 1 or threads % devices == 0
    assert num_envs % threads == 0
    assert threads == 1 or num_envs // threads >= 32


def test_replicas_with_less_than_a_round_left_make_a_short_round(tmp_path):
    found = trainer(tmp_path, "--replicas=2", "--average_every=10", frames_left=3 * 64 * 64)
    assert (found.ppo.average_every, found.ppo.total_timesteps) == (3, 3 * 64 * 64)
