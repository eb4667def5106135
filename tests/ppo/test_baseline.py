"""The trainer that benchmarks measure flowrl against: it must be a good one to be worth beating."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

from flowrl.config import PPOConfig

SCRIPTS = Path(__file__).parents[2] / "scripts"
CONFIG = PPOConfig(
    num_envs=16, num_steps=16, num_minibatches=2, layer_size=8, total_timesteps=20_000
)
ACTIONS = 4


@pytest.fixture(autouse=True)
def _scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))


def script(name):
    return importlib.import_module(name)


class Seen(NamedTuple):
    wanted: jax.Array
    length: jax.Array


class Mirror:
    """Shows a number that should be the action; episodes have four steps.

    With two experts, the second one acts in the last two steps, and there the opposite number is
    wanted.
    """

    observation_size, num_actions = ACTIONS, ACTIONS

    def __init__(self, num_experts: int = 1) -> None:
        self.num_experts = num_experts

    def reset(self, key):
        wanted = jax.random.randint(key, (), 0, ACTIONS)
        return jax.nn.one_hot(wanted, ACTIONS), Seen(wanted, jnp.zeros((), jnp.int32))

    def step(self, key, state, action):
        expert = self.current_expert(state)
        right = jnp.where(expert == 0, state.wanted, ACTIONS - 1 - state.wanted)
        reward = (action == right).astype(jnp.float32)
        obs, fresh = self.reset(key)
        state = Seen(fresh.wanted, state.length + 1)
        done = state.length == 4
        boundary = done | (self.current_expert(state) != expert)
        return obs, state, reward, done, {"boundary": boundary}

    def current_expert(self, state):
        return (state.length >= 2).astype(jnp.int32) * (self.num_experts - 1)


@pytest.mark.parametrize("num_experts", [1, 2])
def test_the_baseline_learns_what_is_seen_with_one_expert_and_with_two(num_experts):
    baseline = script("baseline_ppo").Baseline(
        Mirror(num_experts), replace(CONFIG, lr=5e-3), updates=20
    )
    baseline()
    baseline()
    jax.effects_barrier()
    returns = [metric["returned_episode_returns"] for metric in baseline.logged]
    assert len(returns) == 40
    assert returns[0] < 2  # of 4; by chance 1
    assert returns[-1] > 3.6


def test_a_seed_begins_the_baseline_anew():
    baseline = script("baseline_ppo").Baseline(Mirror(), CONFIG, updates=2)
    found = []
    for seed in (3, 4, 3):
        baseline.begin(seed)
        baseline()
        jax.effects_barrier()
        found.append(list(baseline.logged))
    assert found[0] == found[2] != found[1]


def test_optimistic_resets_begin_new_episodes_where_one_ended_and_nowhere_else():
    envs = script("baseline_envs")
    env = envs.OptimisticResets(envs.LogEnv(Mirror()), num_envs=32)
    _, state = env.reset(jax.random.key(0))
    state = state._replace(env=state.env._replace(length=jnp.arange(32) % 4))
    action = jnp.zeros(32, jnp.int32)
    _, after, _, done, info = jax.jit(env.step)(jax.random.key(1), state, action)
    assert done.tolist() == [length % 4 == 3 for length in range(32)]
    assert after.env.length.tolist() == [(length + 1) % 4 for length in range(32)]
    assert info["returned_episode"].tolist() == done.tolist()
    assert env.num_resets == 2


def test_the_share_of_success_is_that_of_the_newest_updates_with_enough_episodes():
    newest = script("learning_ppo").Newest()
    assert not newest.add(150, 150)  # too few yet
    assert newest.add(50, 10)  # 160 of 200
    assert not newest.add(100, 60)  # 220 of 300
    assert newest.add(199, 199)  # 259 of 299
    assert newest.add(200, 160)


@pytest.mark.slow
@pytest.mark.craftax
def test_the_benchmark_s_figures_have_their_form(tmp_path):
    file = tmp_path / "ppo.json"
    argv = [sys.executable, str(SCRIPTS / "bench_ppo.py"), "--small", "--json", str(file)]
    subprocess.run(argv, check=True, timeout=280)
    found = json.loads(file.read_text())
    assert found["benchmark"] == "ppo"
    cases = [row["case"] for row in found["rows"]]
    assert cases == ["64x64", "64x64 acting", "64x64 learning", "64x64 restocking"]
    assert all(row["ours"] > 0 for row in found["rows"])
    assert found["rows"][0]["unit"] == "steps/s"
    assert found["rows"][0]["ratio"] > 0


@pytest.mark.slow
@pytest.mark.craftax
@pytest.mark.timeout(900)
def test_the_figures_of_several_devices_have_their_form(tmp_path):
    file = tmp_path / "devices.json"
    argv = [sys.executable, str(SCRIPTS / "bench_devices.py"), "--small", "--json", str(file)]
    subprocess.run(argv, check=True, timeout=880)
    rows = {row["case"]: row for row in json.loads(file.read_text())["rows"]}
    paired = {"devices=2", "learning with collectives", "start warm"}
    assert rows.keys() == paired | {"sync share of an update"}
    assert all(rows[case]["ours"] > 0 and rows[case]["ratio"] > 0 for case in paired)
