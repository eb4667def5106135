"""A daemon under load whose processes are killed, starved and locked out every few seconds."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowrl.launchers import process, run_status
from flowrl.parallel.events import Verb
from flowrl.parallel.requests import send_request
from flowrl.paths import GraphPaths
from flowrl.storage import locks
from tests.parallel.stand_in_story import ROOT

PHASES = 4
DESCRIPTORS = 4  # while the daemon is starved of them: the three streams and its own lock


@dataclass(frozen=True, kw_only=True)
class Look:
    """What was seen from outside at one moment."""

    at: float  # wall clock, as the daemon's own figures have it
    merged: int
    children: int


@dataclass(kw_only=True)
class Load:
    """One graph under load, its daemon and what was measured so far."""

    root: Path
    skills: int
    runs: int
    slots: int
    chance: random.Random
    faults: Counter[str] = field(default_factory=Counter)
    restarts: int = 0
    stopped: bool = False  # before all was trained, for lack of time
    gave_up: int = 0  # daemons that ended by themselves, and badly
    looks: list[Look] = field(default_factory=list)
    daemon: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the daemon, or start it again."""
        (self.root / "runs").mkdir(exist_ok=True)
        words = map(str, (self.root, self.skills, self.runs, self.slots))
        with (self.root / "daemon.log").open("ab") as log:
            self.daemon = subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.load_story", *words], cwd=ROOT, stderr=log
            )

    @property
    def pid(self) -> int:
        """The daemon's."""
        assert self.daemon is not None
        return self.daemon.pid

    def end(self) -> None:
        """Kill all that is left."""
        if self.daemon is not None:
            self.daemon.kill()
            self.daemon.wait()
        for lock in self.root.rglob("run.lock"):
            for pid in process.with_open_file(lock):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def merged(self) -> list[str]:
        """The ledger."""
        path = self.root / "ledger"
        return path.read_text().split() if path.exists() else []

    def starts(self) -> Iterator[run_status.StartRecord]:
        """Who runs now, or ran just now."""
        for path in (self.root / "runs").glob("*/run_id"):
            with contextlib.suppress(OSError):  # it has just been merged
                start = run_status.read_start(path.parent, path.read_text())
                if start is not None:
                    yield start


def kill_a_runner(load: Load) -> None:
    """kill -9 of a process that waits for its trainer."""
    start = next(load.starts(), None)
    if start is not None:
        process.send(start.runner_pid, start.runner_start_time, signal.SIGKILL)


def kill_a_trainer(load: Load) -> None:
    """kill -9 of a trainer."""
    for start in load.starts():
        if start.job_pid and process.send(start.job_pid, start.job_start_time, signal.SIGKILL):
            return


def kill_the_scheduler(load: Load) -> None:
    """kill -9 of the daemon; it is started again."""
    os.kill(load.pid, signal.SIGKILL)


def starve_of_descriptors(load: Load) -> None:
    """For half a second the daemon can open nothing: EMFILE. One that is just starting may end."""
    if not (load.root / f"figures.{load.pid}.jsonl").exists():
        return
    before = resource.prlimit(load.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(load.pid, resource.RLIMIT_NOFILE, (DESCRIPTORS, before[1]))
    time.sleep(0.5)
    with contextlib.suppress(ProcessLookupError):
        resource.prlimit(load.pid, resource.RLIMIT_NOFILE, before)


def hold_the_lock(load: Load) -> None:
    """For half a second somebody else has the lock of the merges."""
    with locks.held(load.root / "ledger.lock", timeout_seconds=30.0):
        time.sleep(0.5)


FAULTS: tuple[Callable[[Load], None], ...] = (
    kill_a_runner,
    kill_a_trainer,
    kill_the_scheduler,
    starve_of_descriptors,
    hold_the_lock,
)


def play(load: Load, *, every_seconds: tuple[float, float], limit_seconds: float) -> dict[str, Any]:
    """Train through all faults, to the end or for a while; the report says what it cost."""
    began = time.monotonic()
    send_request(GraphPaths(load.root / "graph"), Verb.PRIORITY, "Skill 0", number=1)
    load.start()
    due = began + load.chance.uniform(*every_seconds)
    order: list[Callable[[Load], None]] = []
    while not ended(load):
        now = time.monotonic()
        watch(load)
        if now - began > limit_seconds:
            limit_seconds = float("inf")
            (load.root / "stop").touch()
            send_request(GraphPaths(load.root / "graph"), Verb.STOP)
            load.stopped = True
        # A folder that cannot be archived in the last tick of all stays until the next start.
        if now > due and load.looks[-1].merged < load.runs - 2 * load.slots:
            order = order or load.chance.sample(FAULTS, len(FAULTS))
            inject(load, order.pop())
            due = time.monotonic() + load.chance.uniform(*every_seconds)
        time.sleep(0.05)
    watch(load)
    return report(load, time.monotonic() - began)


def ended(load: Load) -> bool:
    """Whether the daemon has ended well; one that was killed or gave up is started again."""
    assert load.daemon is not None
    code = load.daemon.poll()
    if code is None or code == 0:
        return code == 0
    load.restarts += 1
    load.gave_up += code != -signal.SIGKILL
    load.start()
    return False


def inject(load: Load, fault: Callable[[Load], None]) -> None:
    load.faults[fault.__name__] += 1
    with contextlib.suppress(ProcessLookupError):
        fault(load)


def watch(load: Load) -> None:
    """Count the merged runs and the daemon's children."""
    children = len(children_of(load.pid))
    load.looks.append(Look(at=time.time(), merged=len(load.merged()), children=children))


def children_of(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []


def report(load: Load, seconds: float) -> dict[str, Any]:
    merged = load.merged()
    state = json.loads((load.root / "graph" / "scheduler_state.json").read_text())
    completed = {line["run_id"] for line in state["skills"] if line["status"] == "completed"}
    wanted = len(completed) if load.stopped else load.runs
    left = [pid for lock in load.root.rglob("run.lock") for pid in process.with_open_file(lock)]
    return {
        "skills": load.skills,
        "runs": len(completed),
        "stopped": load.stopped,
        "seconds": round(seconds, 1),
        "runs_per_second": round(len(completed) / seconds, 1),
        "faults": dict(load.faults),
        "restarts": load.restarts,
        "gave_up": load.gave_up,
        "phases": phases(load),
        "lost": max(wanted, len(set(merged))) - len(completed & set(merged)),
        "merged_twice": len(merged) - len(set(merged)),
        "run_folders_left": len(list((load.root / "runs").iterdir())),
        "processes_left": len(left),
        "temp_files_left": len(temp_files(load.root)),
        "rss_kb_per_1000_runs": growth(load),
    }


def temp_files(root: Path) -> list[Path]:
    """Half-written files and half-removed folders."""
    return [path for pattern in ("*.part", "*.trash", ".tmp-*") for path in root.rglob(pattern)]


def samples(load: Load) -> list[list[dict[str, Any]]]:
    """What each life of the daemon has measured."""
    lives = sorted(load.root.glob("figures.*.jsonl"), key=lambda path: path.stat().st_mtime)
    return [[json.loads(line) for line in path.read_text().splitlines()] for path in lives]


def phases(load: Load) -> list[dict[str, Any]]:
    """Quarters of the time, with what was held and how long beats and saves took in each."""
    began, seconds = load.looks[0].at, load.looks[-1].at - load.looks[0].at
    told = [one for life in samples(load) for one in life]
    found = []
    for number in range(PHASES):
        since, end = (began + seconds * n / PHASES for n in (number, number + 1))
        looks = [look for look in load.looks if since <= look.at <= end]
        mine = [one for one in told if since <= one["at"] <= end]
        merged = looks[-1].merged - looks[0].merged if looks else 0
        found.append(
            {
                "runs_per_second": round(merged * PHASES / seconds, 1),
                "most_fds": max((one["fds"] for one in mine), default=0),
                "most_children": max((look.children for look in looks), default=0),
                "most_rss_kb": max((one["rss_kb"] for one in mine), default=0),
                "tick_ms": spread([t for one in mine for t in one["ticks"]]),
                "save_ms": spread([t for one in mine for t in one["saves"]]),
            }
        )
    return found


def spread(values: list[float]) -> dict[str, float]:
    """Median and 99th percentile."""
    if not values:
        return {"median": 0.0, "p99": 0.0}
    values = sorted(values)
    return {
        "median": round(statistics.median(values), 2),
        "p99": round(values[int(0.99 * len(values))], 2),
    }


def growth(load: Load) -> float:
    """How much memory the longest life gained over its later half, per 1000 runs it merged."""
    life = max(samples(load), key=len, default=[])
    if len(life) < 4:
        return 0.0
    middle, last = life[len(life) // 2], life[-1]
    merged = max(last["merged"] - middle["merged"], 1)
    return round(1000 * (last["rss_kb"] - middle["rss_kb"]) / merged, 1)
