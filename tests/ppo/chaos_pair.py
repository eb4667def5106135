"""Runs of two processes with tiny environments, and a fault of one of them."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from flowrl import runs
from flowrl.errors import EXIT_RESUMABLE
from flowrl.paths import RunPaths
from tests.chaos.place import Trial
from tests.ppo.modules import run_folder
from tests.waiting import limit

FRAMES = 8 * 8  # of one update
UPDATES = 150  # of a run with a fault
IN_TRAINING = 0.5  # of the instants of a fault
SECONDS = limit(120.0)
SMALL = {
    "total_timesteps": 6 * FRAMES,
    "num_envs": 8,
    "num_steps": 8,
    "num_minibatches": 2,
    "update_epochs": 1,
    "layer_size": 4,
    "log_seconds": 0,
    "acting_threads": 1,
}


def begin(folder: Path, *flags: str, **env: str) -> subprocess.Popen[str]:
    """A trainer in this folder, whose module is 9.py."""
    words = [f"--{name}={value}" for name, value in SMALL.items()]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.ppo.tiny_flow", "--module_path=9.py", *words, *flags],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            **env,
        },
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(trainer: subprocess.Popen[str]) -> tuple[int, str]:
    """Its exit code and what it has said."""
    try:
        _, said = trainer.communicate(timeout=SECONDS)
    finally:
        trainer.kill()
    return trainer.returncode, said


def follower_of(trainer: subprocess.Popen[str]) -> int:
    """The process that a trainer has started."""
    (pid,) = _followers_of(trainer)
    return pid


def _followers_of(trainer: subprocess.Popen[str]) -> list[int]:
    if trainer.poll() is not None:
        return []
    children = Path(f"/proc/{trainer.pid}/task/{trainer.pid}/children")
    return list(map(int, children.read_text().split()))


def lives(pid: int) -> bool:
    return Path(f"/proc/{pid}/exe").exists()  # not of a process that has ended


def _wait(run_paths: RunPaths, trainer: subprocess.Popen[str], chance: random.Random) -> None:
    """Until a random instant; half of them lie in the training, the others in the start, too."""
    if chance.random() < IN_TRAINING:
        began = time.monotonic()
        while trainer.poll() is None and not run_paths.metrics.exists():
            assert time.monotonic() < began + SECONDS, "it does not train"
            time.sleep(0.01)
        time.sleep(chance.uniform(0.0, 3.0))
    else:
        time.sleep(chance.uniform(0.1, 8.0))


def one_of_two(folder: Path, chance: random.Random, number: signal.Signals) -> list[Trial]:
    """Send a signal to one of two processes at a random instant, then start the run again.

    There is no trial if both have ended by then.
    """
    run_paths = run_folder(folder / "run")
    flags = (f"--total_timesteps={UPDATES * FRAMES}", "--success_state_rate=1")
    flags = (*flags, "--num_processes=2", "--checkpoint_seconds=1")
    trainer = begin(run_paths.folder, *flags)
    _wait(run_paths, trainer, chance)
    pids = [trainer.pid, *_followers_of(trainer)]
    living = [pid for pid in pids if lives(pid)]
    if not living:
        ended(trainer)
        return []
    hit = chance.choice(living)
    os.kill(hit, number)
    began = time.monotonic()
    code, _ = ended(trainer)
    millis = (time.monotonic() - began) * 1000
    allowed = {0, EXIT_RESUMABLE, -number if hit == trainer.pid else 0}
    began = time.monotonic()
    while any(map(lives, pids)) and time.monotonic() < began + limit(2.0):
        time.sleep(0.01)
    left = sum(map(lives, pids)) + (code not in allowed)
    if code:
        again, said = ended(begin(run_paths.folder, *flags))
        assert again == 0, said
    return [_judged(run_paths, number, millis, left)]


def _judged(run_paths: RunPaths, number: signal.Signals, millis: float, left: int) -> Trial:
    """What came of it."""
    lines = run_paths.metrics.read_text().splitlines() if run_paths.metrics.exists() else []
    numbers = [json.loads(line)["updates"] for line in lines]
    result = runs.read_result(run_paths) if run_paths.result_json.exists() else None
    whole = result is not None and result.frames == UPDATES * FRAMES
    exact = result is not None and sum(one.acted for one in result.experts) == result.frames
    name = "killed" if number == signal.SIGKILL else "asked to stop"
    return Trial(
        fault=f"one of two processes of a run is {name}",
        millis=millis,
        lost=int(not whole),
        merged_twice=int(not exact or numbers != list(range(1, UPDATES + 1))),
        left_over=left,
    )
