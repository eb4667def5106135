"""The trainer as a process of its own, in the tiny game."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
import pytest
from flax.traverse_util import unflatten_dict

from flowrl import console, ppo_flow, runs, storage
from flowrl.config import PPOConfig
from flowrl.errors import EXIT_DIVERGED, EXIT_RESUMABLE, EXIT_USAGE
from flowrl.experts import checkpoint
from flowrl.parallel.training_setup import generate_module_with_remapping
from flowrl.paths import RunPaths
from flowrl.runs import PlannedStep, TrainingRun
from flowrl.skills.graph import SkillGraph
from flowrl.skills.skill import load_library
from tests.games.installing import shapes_in
from tests.ppo.modules import BAKE, TINY, run_folder
from tests.waiting import limit

ENV_NAME = "Craftax-Classic-Symbolic-v1"
EXPERTS = (0, 4)
DONE = "return inventory.pie >= 9"  # never in a few steps: every run spends its budget
FRAMES = 8 * 16
DEADLINE_SECONDS = limit(540.0)  # on a machine that is busy with other things, too
pytestmark = pytest.mark.timeout(600)


def command(run_paths: RunPaths, *flags: str) -> list[str]:
    small = {
        "env_name": "Tiny-v1",
        "total_timesteps": 12 * FRAMES,
        "num_envs": 8,
        "acting_threads": 2,
        "num_steps": 16,
        "num_minibatches": 2,
        "update_epochs": 1,
        "layer_size": 8,
        "max_task_steps": 20,
        "world_pool": 8,
        "log_seconds": 0,
    }
    words = [f"--{name}={value}" for name, value in small.items()]
    module = f"--module_path={run_paths.module}"
    return [sys.executable, "-m", "flowrl.ppo_flow", module, *words, *flags]


def ended(
    run_paths: RunPaths, *flags: str, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(run_paths, *flags),
        env=env,
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )


def wait_until(condition: Callable[[], bool], trainer: subprocess.Popen) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert trainer.poll() is None, "the trainer ended too early"
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def run_paths(tmp_path, tiny_game):
    reward = "return inventory_diff.berry * 1.0"
    return run_folder(tmp_path / "run", BAKE, EXPERTS, game=TINY, done=DONE, reward=reward)


@pytest.fixture
def shapes(tiny_game):
    return shapes_in(tiny_game, 8)


def test_a_run_ends_with_experts_digests_and_exact_frames(run_paths, shapes):
    compiled_as_a_users = {**os.environ, "XLA_FLAGS": ""}
    done = ended(run_paths, env=compiled_as_a_users)
    assert done.returncode == 0, done.stderr
    result = runs.read_result(run_paths)
    assert result.frames == 12 * FRAMES
    assert sum(report.acted for report in result.experts) == result.frames
    assert [report.expert for report in result.experts] == [0, 4]
    for local, report in enumerate(result.experts):
        assert report.sha256 == storage.tree_digest(run_paths.final(local))
        expert = checkpoint.load_expert(run_paths.final(local), checkpoint.like_of(shapes))
        assert checkpoint.shapes_of(expert) == shapes
    first = json.loads(run_paths.metrics.read_text().splitlines()[0])
    assert first["seconds"] > 1.0, "loading and compiling count"
    assert "training" in done.stderr
    assert "Pick Berry" in done.stderr


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, EXIT_RESUMABLE), (signal.SIGINT, 130)],
    ids=["SIGTERM", "Ctrl-C"],
)
def test_a_signal_stops_the_trainer_and_the_same_command_goes_on(run_paths, number, code):
    forever = ("--total_timesteps=1e9", "--no_anneal_lr")
    trainer = subprocess.Popen(command(run_paths, *forever), stdout=subprocess.DEVNULL)
    wait_until(run_paths.metrics.exists, trainer)
    trainer.send_signal(number)
    assert trainer.wait(DEADLINE_SECONDS) == code
    assert not run_paths.result_json.exists()
    assert checkpoint.has_resume(run_paths.resume)
    stopped_at = json.loads(run_paths.metrics.read_text().splitlines()[-1])["updates"]
    done = ended(run_paths, f"--total_timesteps={(stopped_at + 5) * FRAMES}", "--no_anneal_lr")
    assert done.returncode == 0, done.stderr
    result = runs.read_result(run_paths)
    assert result.updates == stopped_at + 5
    assert sum(report.acted for report in result.experts) == result.frames
    assert not run_paths.resume.exists()


def test_a_seed_that_is_no_number_ends_in_one_clear_line(run_paths, shapes):
    for local in range(2):
        leaves = {path: np.full(shape, np.nan, np.float32) for path, shape in shapes.items()}
        checkpoint.save_expert(run_paths.seed(local), unflatten_dict(leaves, sep="/"))
    done = ended(run_paths)
    assert done.returncode == EXIT_DIVERGED
    assert "update 1 of 12 left the loss at nan" in done.stderr
    assert "Traceback" not in done.stderr
    assert not run_paths.finals.exists()
    assert not run_paths.result_json.exists()


@pytest.mark.slow
def test_a_skill_that_lies_ends_in_one_clear_line(run_paths):
    text = run_paths.module.read_text().replace(DONE, "return inventory.berry >= n - 2")
    run_paths.module.write_text(text.replace("'expert': 0}", "'expert': 0, 'gains': {'berry': 2}}"))
    done = ended(run_paths)
    assert done.returncode == EXIT_USAGE
    assert "of them without 2 berry in the inventory; correct its task_is_done" in done.stderr
    assert "Traceback" not in done.stderr
    assert not run_paths.result_json.exists()


def test_a_hostile_module_ends_in_one_clear_line(run_paths):
    text = run_paths.module.read_text()
    run_paths.module.write_text(text.replace(DONE, "return open('x')", 1))
    done = ended(run_paths)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert f"{run_paths.module}:" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "flags",
    [("--lr=-1",), ("--num_minibatches=7",), ("--no_such_flag",)],
    ids=lambda flags: flags[0],
)
def test_a_wrong_command_line_ends_with_2_and_names_the_flag(run_paths, flags):
    done = ended(run_paths, *flags)
    assert done.returncode == EXIT_USAGE
    assert flags[0].split("=")[0].lstrip("-") in done.stderr + done.stdout
    assert "Traceback" not in done.stderr


def test_a_missing_module_is_named(run_paths):
    run_paths.module.unlink()
    done = ended(run_paths)
    assert done.returncode in (1, EXIT_USAGE)
    assert str(run_paths.module) in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.craftax
@pytest.mark.parametrize(
    ("skill", "frames"), [("Collect Wood", 120_000), ("Make Wood Pickaxe", 240_000)]
)
def test_a_library_skill_is_learnt_within_its_budget(tmp_path, skill, frames):
    library = load_library(ENV_NAME, None)
    steps = SkillGraph(library.values()).plan(skill)
    experts = {name: number for number, name in enumerate(dict.fromkeys(s.skill for s in steps))}
    run = TrainingRun(
        run_id="e0.a1.0badcafe",
        skill=skill,
        expert=experts[skill],
        attempt=1,
        plan=tuple(
            PlannedStep(skill=s.skill, count=s.count, expert=experts[s.skill]) for s in steps
        ),
        experts=tuple(experts.values()),
        ancestors=(),
        config={"env_name": ENV_NAME},
    )
    run_paths = RunPaths(tmp_path, experts[skill])
    run_paths.module.write_text(generate_module_with_remapping(run, library))
    words = [f"--module_path={run_paths.module}", f"--total_timesteps={frames}", "--no_anneal_lr"]
    assert ppo_flow.main(words) == 0
    result = runs.read_result(run_paths)
    assert result.stopped_early
    assert result.success_rate >= 0.8
    assert result.frames == result.updates * PPOConfig().num_envs * PPOConfig().num_steps
    assert result.frames == sum(report.acted for report in result.experts)


def test_help_is_there_before_jax_is(tmp_path):
    code = (
        "import sys; from flowrl import ppo_flow\n"
        "try: ppo_flow.main(['--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit('jax' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=os.environ
    )
    assert done.returncode == 0
    assert "--module_path" in done.stdout


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, EXIT_RESUMABLE), (signal.SIGINT, console.EXIT_INTERRUPTED)],
    ids=["SIGTERM", "Ctrl-C"],
)
def test_a_signal_is_remembered_with_its_exit_code(number, code):
    before = signal.getsignal(number)
    stop = console.StopSignal()
    with stop.listening():
        assert stop() is None
        signal.raise_signal(number)
    assert stop() == code
    assert signal.getsignal(number) == before


COMPILING = """
import signal, threading
from flowrl import console
console.start_logging()
threading.Thread(target=threading.Event().wait).start()  # as one that compiles
with console.StopSignal("epoch").listening():
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)
"""


def test_ctrl_c_says_what_it_does_and_a_second_one_does_not_wait():
    done = subprocess.run(
        [sys.executable, "-c", COMPILING],
        stderr=subprocess.PIPE,
        text=True,
        timeout=limit(60),
        check=False,
    )
    assert done.returncode == console.EXIT_INTERRUPTED
    assert done.stderr.splitlines() == [
        "stopping after this epoch; Ctrl-C once more ends at once, without saving",
        "ended; the same command goes on from the last checkpoint, if there is one",
    ]
