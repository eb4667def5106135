"""kill -9 of everything that a run on Slurm needs, at random instants, until the graph is done."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from flowrl.launchers import process, run_status
from flowrl.parallel.training_setup import live_runs
from flowrl.storage import records
from tests.chaos.place import ChaosPlace
from tests.launchers.slurm_cluster import Cluster, cluster, missing
from tests.parallel.making import TABLE, WOOD
from tests.waiting import limit

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=missing()),
    pytest.mark.xdist_group("slurm"),
]
SKILLS = 6
FAULTS = ("scheduler", "scheduler", "runner", "trainer", "runner and trainer", "node", "controller")


class SlurmPlace(ChaosPlace):
    flags = (
        *("--launcher=slurm", "--sandbox=none", "--shared_folder", f"--max_nodes={SKILLS}"),
        *("--retry_backoff=0.05", "--scheduler_poll_interval=0.5", "--max_retries=50"),
    )


@pytest.mark.parametrize(
    ("kills", "seed", "seconds"),
    [
        pytest.param(2, 0, 240.0, id="small"),  # less than a test may take
        pytest.param(
            *(100, 1, limit(600)),
            id="long",
            marks=[pytest.mark.slow, pytest.mark.timeout(3600)],
        ),
    ],
)
def test_every_result_is_merged_once_whatever_is_killed(
    tmp_path, kills, seed, seconds, record_property
):
    chance, made, rounds = random.Random(seed), 0, 0
    while made < kills:
        folder = tmp_path / f"round{rounds}"
        with cluster(folder / "slurm") as machines:
            made += one_round(
                folder / "place", machines, chance, least=kills - made, seconds=seconds
            )
        rounds += 1
    record_property("kills", made)
    print(f"{made} kills in {rounds} graphs")


def one_round(
    folder: Path, machines: Cluster, chance: random.Random, *, least: int, seconds: float
) -> int:
    """Train a graph to its end, in so many seconds, while parts are killed; returns how many."""
    place, made = SlurmPlace(folder), 0
    orders = {skill: {"seconds": chance.uniform(0.5, 4.0)} for skill in (WOOD, TABLE)}
    place.order(orders)
    daemon = place.start()
    until = time.monotonic() + seconds
    try:
        while (code := daemon.poll()) is None or made < min(least, 2):
            assert time.monotonic() < until, place.statuses()
            assert not code, daemon.stderr and daemon.stderr.read()
            time.sleep(chance.uniform(0.2, 3.0))
            fault = chance.choice(FAULTS)
            resume(machines)
            if code == 0:
                break
            if made >= max(least, 2):
                continue
            if fault == "scheduler":
                daemon.kill()
                daemon.wait()
                daemon = place.start()
                made += 1
            else:
                made += hit(fault, place, machines, chance)
        assert code == 0, [(skill, line) for skill, line in place.lines().items()]
        statuses = place.statuses()
        verdict = place.judged("kills", 0.0, skills=SKILLS, calls_for=dict.fromkeys(statuses, 99))
        assert (verdict.lost, verdict.merged_twice, verdict.left_over) == (0, 0, 0), statuses
        assert not list(place.graph_paths.training_runs.glob("*.engine.json"))
        assert not [p for lock in folder.rglob("run.lock") for p in process.with_open_file(lock)]
    finally:
        place.end()
    return made


def hit(fault: str, place: SlurmPlace, machines: Cluster, chance: random.Random) -> int:
    """Kill one thing; returns 1 if it was there."""
    if fault == "controller":
        machines.kill("slurmctld")
        time.sleep(chance.uniform(0.0, 3.0))
        machines.restart_controller()
        return 1
    if fault == "node":
        node = chance.choice(machines.nodes)
        machines.kill(f"slurmd.{node}")
        time.sleep(chance.uniform(0.0, 3.0))
        machines.start_node(node)
        return 1
    runs = list(live_runs(place.graph_paths))
    chance.shuffle(runs)
    for run_paths in runs:
        pids = _pids(run_paths.folder, fault)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if pids:
            return 1
    return 0


def _pids(folder: Path, fault: str) -> list[int]:
    """Return the processes of a run that the fault kills, as far as they live."""
    path = folder / "start.json"
    if not path.exists():
        return []
    start = records.read(path, run_status.StartRecord, sealed=False)
    runner = (start.runner_pid, start.runner_start_time)
    trainer = (start.job_pid or 0, start.job_start_time)
    chosen = {"runner": [runner], "trainer": [trainer]}.get(fault, [runner, trainer])
    return [pid for pid, start_time in chosen if process.alive(pid, start_time)]


def resume(machines: Cluster) -> None:
    """Take nodes back that Slurm has drained, as an administrator would."""
    for node in machines.nodes:
        words = ["scontrol", "update", f"nodename={node}", "state=resume"]
        env = {**os.environ, "SLURM_CONF": str(machines.conf)}
        subprocess.run(words, env=env, capture_output=True, check=False)
