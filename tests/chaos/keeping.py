"""What was learned stays, and nothing else does: kills of trainers, of runners, and Ctrl-C."""

from __future__ import annotations

import contextlib
import json
import operator
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from flowrl.launchers import process, run_status
from flowrl.parallel.training_setup import live_runs
from flowrl.paths import RunPaths
from flowrl.runs import read_run
from tests.chaos.place import ChaosPlace, Trial
from tests.launchers.conftest import until
from tests.parallel.making import LIBRARY
from tests.parallel.stand_in_story import DEADLINE_SECONDS, ROOT, ended

CHECKPOINT_SECONDS = 3.0
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_BEGUN = re.compile(r"training · update [\d,]+ · ([\d,]+) of")


def runners_killed_after_results(place: ChaosPlace, chance: random.Random, *, skills: int = 2):
    """kill -9 of every runner between result.json and exit.json: no run is made again."""
    place.order({name: {"lingers": 60.0} for name in LIBRARY})
    daemon = place.start(f"--max_nodes={skills}", "--max_parallel_skills=3")
    killed: set[str] = set()
    began = time.monotonic()
    while daemon.poll() is None:
        for run_paths in live_runs(place.graph_paths):
            pid = runner_of(run_paths) if run_paths.result_json.exists() else 0
            if pid and str(run_paths.folder) not in killed:
                killed.add(str(run_paths.folder))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    assert ended(daemon)[0] == 0
    assert len(killed) == skills
    millis = 1000 * (time.monotonic() - began) / skills
    verdict = place.judged(
        "kill -9 of the runner after a result", millis, skills=skills, calls_for={}
    )
    return [verdict, *[Trial(fault=verdict.fault, millis=millis)] * (skills - 1)]


def interrupted_again_and_again(place: ChaosPlace, chance: random.Random, *, rounds: int = 2):
    """Ctrl-C, its run ends unwatched, start again: no session, no process stays."""
    place.tmux("new-session", "-d", "-s", "somebodys", "sleep", "3600")
    flags = (f"--max_nodes={rounds}", "--max_parallel_skills=1")
    began = time.monotonic()
    for number in range(rounds):
        place.order({name: {"gate": f"gate{number}"} for name in LIBRARY})
        daemon = place.start(*flags)
        until(lambda n=number: len(set(place.launches())) > n, seconds=DEADLINE_SECONDS)
        time.sleep(chance.uniform(0.0, 0.5))
        daemon.send_signal(signal.SIGINT if chance.random() < 0.8 else signal.SIGKILL)
        ended(daemon)
        place.open(f"gate{number}")
        living = [*live_runs(place.graph_paths)]
        until(lambda runs=living: not any(map(runner_of, runs)), seconds=DEADLINE_SECONDS)
    assert ended(place.start(*flags))[0] == 0
    millis = 1000 * (time.monotonic() - began) / rounds
    with contextlib.suppress(AssertionError):
        until(lambda: not processes_of(place), seconds=30)
    verdict = place.judged(
        "Ctrl-C, ended unwatched, started again", millis, skills=rounds, calls_for={}
    )
    sessions = len(place.tmux("list-sessions")) - 1
    left = verdict.left_over + sessions + len(processes_of(place))
    return [Trial(fault=verdict.fault, millis=millis, lost=verdict.lost, left_over=left)] + [
        Trial(fault=verdict.fault, millis=millis)
    ] * (rounds - 1)


def trainers_killed_at_random(place: ChaosPlace, chance: random.Random, *, kills: int = 2):
    """kill -9 of real trainers: each goes on from a checkpoint of the last seconds.

    `millis` is the training that was lost; `lost` counts kills that cost more than the seconds
    between two checkpoints and the longest update, with its checkpoint.
    """
    words = (
        *(sys.executable, "-m", "flowrl.bottomup_parallel", str(place.graph_paths.root)),
        *("--max_nodes=2", "--max_parallel_skills=2", "--launcher=tmux", "--tmux_socket=chaos"),
        *("--max_retries=1000", "--retry_backoff=0", "--success_state_rate=1", "--slot_minutes=0"),
        *("--total_timesteps=1_000_000_000", f"--checkpoint_seconds={CHECKPOINT_SECONDS}"),
        *("--num_envs=32", "--num_steps=16", "--lr=1e-9", "--log_seconds=0"),
    )
    daemon = subprocess.Popen(words, stderr=subprocess.DEVNULL, cwd=ROOT, env=place.env)
    trials = []
    try:
        runs = until(lambda: two(place), seconds=DEADLINE_SECONDS)
        ready_at = {run_paths.folder: 0.0 for run_paths in runs}
        while len(trials) < kills:
            due = [
                run_paths for run_paths in runs if ready_at[run_paths.folder] <= time.monotonic()
            ]
            for run_paths in due[: kills - len(trials)]:
                trials.append(kill_and_see(run_paths))
                ready_at[run_paths.folder] = time.monotonic() + chance.uniform(0.0, 8.0)
            time.sleep(0.1)
    finally:
        daemon.kill()
        daemon.wait()
        place.end()
    return trials


def two(place: ChaosPlace) -> list[RunPaths]:
    """The two runs, once each has a checkpoint."""
    runs = [
        run_paths
        for run_paths in live_runs(place.graph_paths)
        if any(run_paths.resume.glob("[0-9]*"))
    ]
    return runs if len(runs) == 2 else []


def kill_and_see(run_paths: RunPaths) -> Trial:
    """Kill the trainer, wait until the next one trains, and compare their frames."""
    start = run_status.read_start(run_paths.folder, read_run(run_paths).run_id)
    assert start is not None
    assert start.job_pid is not None
    offset = run_paths.training_log.stat().st_size
    os.kill(start.job_pid, signal.SIGKILL)
    updates = seconds_by_frames(run_paths)

    def resumed() -> re.Match[str] | None:
        with run_paths.training_log.open(encoding="utf-8", errors="replace") as file:
            file.seek(offset)
            return _BEGUN.search(_COLOUR.sub("", file.read()))

    found = until(resumed, seconds=DEADLINE_SECONDS)
    lost_seconds = max(updates.values()) - updates[int(found[1].replace(",", ""))]
    longest = max(map(operator.sub, list(updates.values())[1:], updates.values()))
    too_much = lost_seconds > CHECKPOINT_SECONDS + longest
    return Trial(fault="kill -9 of a trainer", millis=1000 * lost_seconds, lost=int(too_much))


def seconds_by_frames(run_paths: RunPaths) -> dict[int, float]:
    """How long the run had trained after so many frames, by the whole lines of metrics.jsonl."""
    lines = run_paths.metrics.read_text().rpartition("\n")[0].splitlines()
    return {line["frames"]: line["seconds"] for line in map(json.loads, lines)}


def runner_of(run_paths: RunPaths) -> int:
    """The pid of a run's runner; 0 without one."""
    return next(iter(process.of_script(run_status.RUNNER, str(run_paths.spec_json.resolve()))), 0)


def processes_of(place: ChaosPlace) -> list[int]:
    """The processes whose command line names the graph, but for the tmux server."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes()
            if str(place.graph_paths.root).encode() in words and not words.startswith(b"tmux"):
                found.append(int(folder.name))
    return found
