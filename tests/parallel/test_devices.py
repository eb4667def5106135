"""Runs that get several devices at once: in the pure core, in real sessions, in real training."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl import bottomup, bottomup_parallel, command_line
from flowrl.config import BottomUpConfig, ScheduleConfig
from flowrl.launchers.run_status import read_start
from flowrl.parallel import start
from flowrl.parallel.events import RunRequest
from flowrl.parallel.skill_sources import skill_configs
from flowrl.parallel.state import Slots
from flowrl.parallel.status import Entry, Preparing
from flowrl.parallel.training_backend import TrainingBackend
from flowrl.paths import GraphPaths
from flowrl.runs import read_run
from tests.games.installing import installed
from tests.launchers.conftest import nothing_survives, server_folder  # noqa: F401
from tests.machine import program
from tests.parallel.making import GRAPH, WOOD
from tests.parallel.scheduling import NOW
from tests.parallel.stand_in_story import Place, ended
from tests.waiting import until

HOST_DEVICES = "--xla_force_host_platform_device_count=2"
TMUX = ("--launcher=tmux", "--tmux_socket=test")


TINY = (
    *("--num_envs=32", "--num_steps=16", "--num_minibatches=4", "--update_epochs=1"),
    *("--total_timesteps=2048", "--max_task_steps=40", "--success_state_rate=0"),
    *("--min_success_rate=0", "--no_use_wandb"),
)
SAPLING, DRINK = "Collect Sapling", "Collect Drink"


def slots(devices, *, each, running=(), runs=99):
    schedule = ScheduleConfig(max_parallel_skills=runs, devices_per_run=each)
    entries = [Entry(skill=str(order), status=status) for order, status in enumerate(running)]
    return Slots(schedule, devices, entries)


# The core


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 3)),
    st.integers(1, 4),
    st.lists(st.tuples(st.booleans(), st.integers(0, 5))),
)
def test_sets_of_devices_never_overlap_more_than_they_may(devices, each, history):
    """Each of the history is a start, alone or not, after the run of that number has ended."""
    wanted = each if devices else 0
    running: list[Preparing] = []
    for alone, ended_run in history:
        running = running[:ended_run] + running[ended_run + 1 :]
        loads = Counter(name for run in running for name in run.devices)
        closed = {name for run in running if run.alone for name in run.devices}
        most = {name: 1 if alone else number for name, number in devices.items()}
        free = [name for name in devices if loads[name] < most[name] and name not in closed]
        taken = slots(devices, each=each, running=running).take(alone=alone)
        if len(free) < wanted:
            assert taken is None
            continue
        assert taken is not None
        assert len(set(taken)) == len(taken) == wanted
        assert set(taken) <= set(free)
        shares = {name: loads[name] / devices[name] for name in free}
        rest = [shares[name] for name in free if name not in taken]
        assert max((shares[name] for name in taken), default=0) <= min(rest, default=9)
        running.append(Preparing(attempt=1, since=NOW, devices=taken, alone=alone))


# Sessions


@pytest.fixture
def place(tmp_path, server_folder, monkeypatch):  # noqa: F811
    """A machine with four GPUs, as far as a daemon can see."""
    (tmp_path / "plugins" / "jax_cuda12_plugin").mkdir(parents=True)
    lines = "".join(f"{number}, GPU-{number}, 80000\\n" for number in range(4))
    bin_folder = program(tmp_path / "bin" / "nvidia-smi", f"printf '{lines}'").parent
    monkeypatch.setenv("PATH", f"{bin_folder}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "plugins"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    place = Place(tmp_path)
    yield place
    place.end()


def visible_to(place: Place, skill: str) -> str:
    """CUDA_VISIBLE_DEVICES of a trainer that has told its progress."""
    line = until(lambda: place.lines().get(skill, {}).get("handle") and place.lines()[skill])
    run_paths = place.graph_paths.run(line["expert"], skill)
    until(run_paths.progress.exists)
    pid = until(lambda: read_start(run_paths.folder, line["run_id"]).job_pid)
    words = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(word.partition("=")[::2] for word in words)["CUDA_VISIBLE_DEVICES"]


@pytest.mark.tmux
def test_runs_in_sessions_get_pairs_of_gpus_and_the_third_waits(place, flowrl):
    place.order({skill: {"gate": "gate"} for skill in (WOOD, SAPLING, DRINK)})
    flags = (*TMUX, "--devices_per_run=2", "--max_parallel_skills=9", "--max_nodes=4")
    daemon = place.start(*flags)
    until(lambda: len(place.launches()) == 2)
    first, second = place.launches()
    assert {visible_to(place, first), visible_to(place, second)} == {"0,1", "2,3"}
    shown = flowrl("status", place.graph_paths.root).out
    assert shown.count(" 0-1 ") == shown.count(" 2-3 ") == shown.count("a free slot") == 1
    place.open("gate")
    code, said = ended(daemon)
    assert code == 0, said
    events = map(json.loads, place.graph_paths.events.read_text().splitlines())
    given = [event["devices"] for event in events if event["status"] == "running"]
    assert len(given) == 4
    assert given.count(["0", "1"]) + given.count(["2", "3"]) == 4


# Real training


@pytest.mark.tmux
def test_a_real_trainer_trains_on_all_gpus_that_it_gets(place, tmp_path, monkeypatch, flowrl):
    """Two devices of the CPU are there for the GPUs, which JAX does not find."""
    monkeypatch.setenv("PYTHONPATH", installed(tmp_path))
    monkeypatch.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} {HOST_DEVICES}")
    root = place.graph_paths.root
    words = [sys.executable, "-m", "flowrl.bottomup_parallel", f"--graph_path={root}", *TMUX]
    words += ["--devices_per_run=2", "--env_name=Tiny-v1", "--max_nodes=1", *TINY]
    daemon = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    place.daemons.append(daemon)
    assert visible_to(place, "Pick Berry") == "0,1"
    code, said = ended(daemon)
    assert code == 0, said
    said = flowrl("logs", "Pick Berry", "--graph_path", root).out
    assert "32 environments in 2 shards on 2 devices" in said
    assert read_run(place.graph_paths.archive(0, "Pick Berry")).config["num_devices"] == 2


@pytest.mark.craftax
@pytest.mark.slow
def test_a_skill_of_the_real_game_is_trained_on_two_devices_of_the_cpu(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} {HOST_DEVICES}")
    place = Place(tmp_path)
    words = [sys.executable, "-m", "flowrl.bottomup_parallel", "--launcher=local", *TINY]
    words += [f"--graph_path={place.graph_paths.root}", f"--target_skill={WOOD}", "--num_devices=2"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (entry,) = place.experts().values()
    assert entry[0] == WOOD
    log = place.graph_paths.archive(0, WOOD).training_log.read_text()
    assert "32 environments in 2 shards on 2 devices" in log


@pytest.mark.parametrize(("devices", "number"), [("0123", 4), ("5", 1), ("", 1)])
def test_a_resumed_run_trains_on_the_devices_that_it_gets_now(tmp_path, devices, number):
    def backend(*words):
        parsed = command_line.parse(BottomUpConfig, ["--sandbox=none", *words])
        skills = skill_configs(parsed, GRAPH.skills)
        return TrainingBackend(GraphPaths(tmp_path), parsed, GRAPH, skills=skills)

    request = RunRequest(skill=WOOD, expert=0, attempt=1, devices=("0", "1"))
    first = backend("--devices_per_run=2").prepare(request)
    assert "--num_devices=2" in first.argv
    again = replace(request, run_id=first.run_id, devices=tuple(devices))
    assert f"--num_devices={number}" in backend().reopen(again).argv


# Refusals


@pytest.mark.parametrize("program", [bottomup, bottomup_parallel], ids=["one", "many"])
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "--devices_per_run=4",
            "there is no GPU that JAX can use; .*--num_devices 4 and set XLA_FLAGS=.*count=4",
        ),
        ("--num_devices=3 --num_envs=66", "a run on this CPU sees 2; lower it, or set .*count=3"),
    ],
)
def test_more_devices_than_a_run_would_see_are_refused_at_the_start(
    tmp_path, capsys, monkeypatch, program, words, said
):
    monkeypatch.setenv("XLA_FLAGS", HOST_DEVICES)
    monkeypatch.setattr(start, "CUDA_PLUGINS", ("no_such_plugin",))
    graph = tmp_path / "graph"
    assert program.main([f"--graph_path={graph}", *words.split()]) == 2
    error = capsys.readouterr().err
    assert re.search(said, error)
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir()), "nothing is on disk"
