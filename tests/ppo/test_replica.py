"""Replicas of a skill of the tiny game, by the programs that users call."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from flowrl.command_line import to_argv
from flowrl.config import PPOConfig
from flowrl.errors import EXIT_RESUMABLE, EXIT_USAGE
from flowrl.experts.store import ExpertStore
from flowrl.paths import GraphPaths
from flowrl.replicas.rounds import Rounds
from flowrl.runs import read_result
from tests.games.installing import graph_of
from tests.launchers.conftest import nothing_survives, server_folder  # noqa: F401
from tests.parallel.making import prepare
from tests.waiting import AT_ONCE, limit, until

BERRY = "Pick Berry"
CONFIG = PPOConfig(
    env_name="Tiny-v1",
    replicas=2,
    average_every=2,
    total_timesteps=2 * 6 * 8 * 16,
    num_envs=16,
    num_steps=16,
    num_minibatches=2,
    update_epochs=2,
    layer_size=16,
    max_task_steps=4,  # too few from some of the cells: no success ends a run early
    success_state_rate=1.0,
    coverage_bonus=0.0,
    log_seconds=0,
)
pytestmark = [pytest.mark.usefixtures("tiny_game"), pytest.mark.timeout(900)]


def prepared(folder: Path, config: PPOConfig = CONFIG):
    graph = graph_of(graph_paths := GraphPaths(folder), BERRY, config.env_name)
    return prepare(graph_paths, BERRY, 0, {}, graph=graph, config=config).run_paths


def begin(run_paths, config: PPOConfig = CONFIG) -> subprocess.Popen[str]:
    module = ("--module_path", str(run_paths.module))
    return subprocess.Popen(
        (sys.executable, "-m", "flowrl.ppo_flow", *module, *to_argv(config)),
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        stderr=subprocess.PIPE,
        text=True,
    )


def children_of(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def has_round(run_paths, number: int) -> bool:
    newest = Rounds(run_paths.rounds).newest()
    return newest is not None and newest.number >= number


def test_a_run_whose_replicas_are_killed_ends_as_one_whose_are_not(tmp_path):
    # Of 24 rounds, so that it has not ended before it is killed.
    config = replace(CONFIG, total_timesteps=8 * CONFIG.total_timesteps)
    layouts = [prepared(tmp_path / name, config) for name in ("whole", "killed")]
    whole = begin(layouts[0], config)
    said = whole.communicate(timeout=limit(300))[1]
    assert whole.returncode == 0, said
    killed = begin(layouts[1], config)
    until(lambda: has_round(layouts[1], 1) or killed.poll() is not None, seconds=200, every=AT_ONCE)
    os.kill(children_of(killed.pid)[0], signal.SIGKILL)
    said = killed.communicate(timeout=limit(300))[1]
    assert killed.returncode == 0, said
    assert "signal 9 ended it" in said
    assert all(f"replica {number} of 2: 8 of 16 environments" in said for number in range(2))
    results = [read_result(run_paths) for run_paths in layouts]
    contents = [[expert.content for expert in result.experts] for result in results]
    assert contents[0] == contents[1]
    one, other = (replace(r, run_id="", wall_seconds=0.0, experts=()) for r in results)
    assert one == other
    assert one.frames == config.total_timesteps
    assert not layouts[0].rounds.exists()
    assert not layouts[0].replicas.exists()
    assert layouts[0].metrics.exists()


@pytest.mark.slow
def test_a_run_with_the_outer_step_goes_on_with_the_same_bits(tmp_path):
    config = replace(CONFIG, average_outer="sgd", average_every=1)
    layouts = [prepared(tmp_path / name, config) for name in ("whole", "killed")]
    whole = begin(layouts[0], config)
    said = whole.communicate(timeout=limit(300))[1]
    assert whole.returncode == 0, said
    killed = begin(layouts[1], config)
    until(lambda: has_round(layouts[1], 2) or killed.poll() is not None, seconds=200, every=AT_ONCE)
    killed.kill()
    killed.communicate()
    resumed = begin(layouts[1], config)
    said = resumed.communicate(timeout=limit(300))[1]
    assert resumed.returncode == 0, said
    one, other = (read_result(run_paths) for run_paths in layouts)
    assert [e.content for e in one.experts] == [e.content for e in other.experts]
    assert (one.frames, one.updates) == (other.frames, other.updates)


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, EXIT_RESUMABLE)],
    ids=["killed", "stopped"],
)
def test_replicas_end_with_their_averager_while_they_compile(tmp_path, number, code):
    run_paths = prepared(tmp_path / "graph")
    averager = begin(run_paths)
    until(lambda: len(children_of(averager.pid)) == 2, every=AT_ONCE)
    pids = children_of(averager.pid)
    averager.send_signal(number)
    averager.communicate()
    assert averager.returncode == code
    until(lambda: not any(Path(f"/proc/{pid}/exe").exists() for pid in pids))


def test_a_replica_that_is_refused_says_why_in_the_last_line(tmp_path):
    run_paths = prepared(tmp_path / "graph")
    run_paths.module.write_text(run_paths.module.read_text() + "\n# edited\n")
    averager = begin(run_paths)
    said = averager.communicate(timeout=limit(120))[1]
    assert averager.returncode in (1, EXIT_USAGE)
    assert said.strip().rpartition("\n")[2].startswith("flowrl: ")
    assert "is not the module that" in said.strip().rpartition("\n")[2]


def train_words(graph_paths, config: PPOConfig, *, sandbox: str) -> tuple[str, ...]:
    words = ("train", str(graph_paths.root), "--target_skill", BERRY, f"--sandbox={sandbox}")
    own = ("--tmux_socket=test", "--min_success_rate=0", *to_argv(config))
    return (sys.executable, "-m", "flowrl", *words, *own)


@pytest.mark.slow
@pytest.mark.tmux
@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_confined_replicas_train_to_a_merge(tmp_path, server_folder):  # noqa: F811
    graph_paths = GraphPaths(tmp_path / "graph")
    done = subprocess.run(
        train_words(graph_paths, CONFIG, sandbox="bwrap"),
        check=False,
        capture_output=True,
        text=True,
        timeout=limit(500),
    )
    assert done.returncode == 0, done.stderr
    run_paths = graph_paths.archive(0, BERRY)
    expert = ExpertStore(graph_paths).manifest().experts[0]
    assert [entry.frames for entry in expert.lineage] == [CONFIG.total_timesteps]
    assert read_result(run_paths).frames == CONFIG.total_timesteps
    said = re.sub(r"\x1b\[[0-9;]*m", "", run_paths.training_log.read_text())  # its colours
    assert f"round 3: {CONFIG.total_timesteps} frames" in said


@pytest.mark.slow
@pytest.mark.tmux
def test_replicas_are_one_run_to_a_scheduler_that_is_killed(tmp_path, server_folder):  # noqa: F811
    graph_paths = GraphPaths(tmp_path / "graph")
    config = replace(CONFIG, total_timesteps=10 * CONFIG.total_timesteps, success_state_rate=0.99)
    run_paths = graph_paths.run(0, BERRY)

    def scheduler() -> subprocess.Popen[str]:
        words = train_words(graph_paths, config, sandbox="none")
        return subprocess.Popen(words, stderr=subprocess.PIPE, text=True)

    first = scheduler()
    until(lambda: has_round(run_paths, 2) or first.poll() is not None, seconds=300, every=AT_ONCE)
    assert first.poll() is None, first.communicate()
    first.kill()
    first.communicate()
    second = scheduler()
    end = time.monotonic() + limit(400)
    while second.poll() is None and time.monotonic() < end:
        time.sleep(0.1)
    assert second.returncode == 0, second.stderr.read()
    result = read_result(graph_paths.archive(0, BERRY))
    expert = ExpertStore(graph_paths).manifest().experts[0]
    assert [entry.frames for entry in expert.lineage] == [result.frames]
    assert result.frames == config.total_timesteps
    assert not run_paths.folder.exists()
