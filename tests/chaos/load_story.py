"""A daemon under load: `python -m tests.chaos.load_story ROOT SKILLS RUNS SLOTS`.

Of a graph of SKILLS skills it trains the first RUNS, whose needs are two of the fifty before them
at most, by processes that do nothing but write a result; all others are blocked. What its beats
and saves took, and what the process holds, goes to `figures.PID.jsonl` every second.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flowrl import storage
from flowrl.errors import BusyError, FileRefusedError
from flowrl.launchers import run_status
from flowrl.launchers.base import Job
from flowrl.launchers.local import LocalLauncher
from flowrl.parallel.events import RunRequest, Verb
from flowrl.parallel.scheduler import SkillScheduler
from flowrl.parallel.state import SchedulerState, StateFile
from flowrl.parallel.status import Entry, Failed, Held
from flowrl.parallel.training_setup import remove_part_files
from flowrl.storage import locks
from tests.launchers.conftest import SUCCEED
from tests.parallel.scheduling import QuietBackend

NEVER = "Never"
TRAINER = "import sys, time\ntime.sleep(float(sys.argv[1]))\n"


def skills_of(skills: int, runs: int) -> list[Entry]:
    """The graph: the same for the same numbers."""
    chance = random.Random(skills)
    held = Held(why="never trained", attempt=1, at=datetime.now(UTC))
    graph = [Entry(skill=NEVER, status=held)]
    for number in range(skills - 1):
        near = range(max(0, number - 50), number)
        needs = {f"Skill {n}" for n in chance.sample(near, min(len(near), chance.randint(0, 2)))}
        needs |= {NEVER} if number >= runs else set()
        graph.append(Entry(skill=f"Skill {number}", needs=tuple(sorted(needs))))
    return graph


class LoadBackend(QuietBackend):
    """Folders named by run id, and a ledger under a lock, as the manifest is."""

    def __init__(self, root: Path, figures: Figures) -> None:
        self.root = root
        self.figures = figures
        self.ledger = root / "ledger"

    def prepare(self, task: RunRequest) -> Job:
        run_id = f"e{task.expert}.a{task.attempt}.{secrets.token_hex(4)}"
        folder = self._folder(task)
        if folder.exists() and not run_status.becomes_free(folder):
            raise BusyError(f"{folder}: a process of the former attempt lives")
        storage.remove_tree(folder)  # of an attempt that a killed daemon made
        storage.make_dir(folder)
        storage.write_atomic(folder / "run_id", run_id)
        return self._job(task, run_id)

    def resume(self, task: RunRequest) -> Job:
        job = self.reopen(task)
        if job is None:
            raise FileRefusedError(f"{task.run_id} has no folder any more")
        return job

    def reopen(self, task: RunRequest) -> Job | None:
        assert task.run_id is not None
        return self._job(task, task.run_id) if task.run_id == self._run_in(task) else None

    def merge(self, task: RunRequest) -> Mapping[str, Any]:
        with locks.held(self.root / "ledger.lock", timeout_seconds=0.2):
            merged = self.ledger.read_text().split() if self.ledger.exists() else []
            if task.run_id not in merged:
                storage.append_line(self.ledger, str(task.run_id))
        self.figures.merged += 1
        return {"run_id": task.run_id}

    def archive(self, task: RunRequest) -> None:
        self.discard(task)
        storage.remove_leftovers(self.root / "runs")

    def recover(self) -> None:
        """Remove what a daemon that was killed has merged and not put away."""
        merged = self.ledger.read_text().split() if self.ledger.exists() else []
        for folder in (self.root / "runs").glob("*"):
            if (folder / "run_id").exists() and (folder / "run_id").read_text() in merged:
                storage.remove_tree(folder)

    def discard(self, task: RunRequest) -> None:
        if task.run_id == self._run_in(task):
            storage.remove_tree(self._folder(task))

    def _folder(self, task: RunRequest) -> Path:
        return self.root / "runs" / f"e{task.expert}"

    def _run_in(self, task: RunRequest) -> str:
        """Whose folder it is; of nobody when it is not there.

        Raises:
          OSError: it cannot be looked at now, for lack of descriptors.
        """
        try:
            return (self._folder(task) / "run_id").read_text()
        except FileNotFoundError:
            return ""

    def _job(self, task: RunRequest, run_id: str) -> Job:
        folder = self._folder(task)
        seconds = f"{random.uniform(0.0, 0.05):.3f}"
        return Job(
            name=f"flowrl_e{task.expert}",
            run_id=run_id,
            argv=(sys.executable, "-I", "-S", "-c", TRAINER + SUCCEED % run_id, seconds),
            env={"PATH": os.defpath},
            cwd=folder,
            folder=folder,
        )


class Figures:
    """What beats and saves took, in milliseconds, and what the process holds meanwhile."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written = 0.0
        self.ticks: list[float] = []
        self.saves: list[float] = []
        self.merged = 0  # by this process

    def write(self) -> None:
        """Once a second at most."""
        if time.monotonic() - self._written < 1.0:
            return
        facts = {"at": time.time(), "ticks": self.ticks, "saves": self.saves}
        try:
            facts |= {"merged": self.merged, **held_by_us()}
            with self._path.open("a") as file:
                file.write(json.dumps(facts) + "\n")
        except OSError:  # starved of descriptors
            return
        self.ticks, self.saves = [], []
        self._written = time.monotonic()


def held_by_us() -> dict[str, int]:
    """Memory in kB and descriptors of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "rss_kb": pages * os.sysconf("SC_PAGE_SIZE") // 1024,
        "fds": len(list(Path("/proc/self/fd").iterdir())),
    }


class MeasuredScheduler(SkillScheduler):
    """Measures its beats."""

    figures: Figures

    def tick(self, now: datetime | None = None) -> None:
        began = time.perf_counter()
        super().tick(now)
        self.figures.ticks.append(1000 * (time.perf_counter() - began))

    def wait(self) -> None:
        self.figures.write()
        super().wait()


def measure_saves(figures: Figures) -> None:
    save = StateFile.save

    def measured(self: StateFile, state: SchedulerState) -> None:
        began = time.perf_counter()
        save(self, state)
        figures.saves.append(1000 * (time.perf_counter() - began))

    StateFile.save = measured


def main(root: Path, skills: int, runs: int, slots: int) -> int:
    """Train them all; a skill that was given up is tried again."""
    figures = Figures(root / f"figures.{os.getpid()}.jsonl")
    measure_saves(figures)
    scheduler = MeasuredScheduler(
        root / "graph",
        launcher=LocalLauncher(grace_seconds=0.5),
        max_parallel_skills=slots,
        scheduler_poll_interval=0.5,
        retry_backoff=0.05,
    )
    scheduler.figures = figures
    with scheduler:
        remove_part_files(scheduler.graph_paths)  # as the real story's recovery does
        storage.remove_leftovers(root / "runs")
        storage.remove_part_files(root)
        for folder in (root / "runs").glob("*"):
            storage.remove_part_files(folder)
        backend = LoadBackend(root, figures)
        backend.recover()
        scheduler.set_callbacks(backend=backend)
        if not scheduler.state.entries:
            scheduler.add_skills(skills_of(skills, runs))
        while True:
            state = scheduler.run()
            failed = [
                entry.skill for entry in state.entries.values() if isinstance(entry.status, Failed)
            ]
            if not failed or (root / "stop").exists():
                return 0
            for skill in failed:
                scheduler.ask(skill, Verb.RETRY)


if __name__ == "__main__":
    folder, *numbers = sys.argv[1:]
    sys.exit(main(Path(folder), *map(int, numbers)))
