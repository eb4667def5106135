"""A graph that is trained under chaos, and what must be true of it afterwards."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from flowrl.experts.store import ExpertStore
from flowrl.launchers import process, run_status
from tests.launchers.conftest import until
from tests.parallel.making import TABLE, WOOD
from tests.parallel.stand_in_story import DEADLINE_SECONDS, ROOT, Place

FLAGS = (
    *("--launcher=tmux", "--tmux_socket=chaos", "--sandbox=none"),
    *("--retry_backoff=0.05", "--scheduler_poll_interval=0.5"),
)
TO_TABLE = f"--target_skill={TABLE}"  # collect wood, then place a table


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One fault and what came of it; all but the time should be zero.

    `millis` is the time from the fault to the state that answers it, `cpu_millis` what a restart
    took of a core.
    """

    fault: str
    millis: float
    cpu_millis: float = 0.0
    relaunched: int = 0  # starts of trainers beyond those that the fault calls for
    lost: int = 0  # skills that are not completed and merged in the end
    merged_twice: int = 0
    left_over: int = 0  # run folders, half-written and half-removed files

    def at(self, millis: float, cpu_millis: float) -> Trial:
        """The same with other times."""
        return replace(self, millis=millis, cpu_millis=cpu_millis)


class ChaosPlace(Place):
    """A `Place` whose daemons use a tmux server of their own and tell when they are ready."""

    flags = FLAGS

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        super().__init__(folder)
        self.env = {**os.environ, "TMUX_TMPDIR": str(folder), "HOME": str(folder)}
        self.env.pop("TMUX", None)
        self.env.pop("FLOWRL_FAULT", None)
        self._began: dict[int, float] = {}

    def start(self, *flags: str) -> subprocess.Popen[str]:
        """Start a daemon on the graph."""
        graph = f"--graph_path={self.graph_paths.root}"
        began = time.time()
        daemon = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.story", graph, *self.flags, *flags],
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=self.env,
        )
        self._began[daemon.pid] = began
        self.daemons.append(daemon)
        return daemon

    def times_to_ready(self, daemon: subprocess.Popen[str]) -> tuple[float, float]:
        """Milliseconds, and those of a core, from the daemon's start until it has taken up all
        runs; a daemon that has nothing to wait for has no other times than its end's."""
        mark = self.folder / f"ready.{daemon.pid}"
        until(lambda: mark.exists() or daemon.poll() is not None, seconds=DEADLINE_SECONDS)
        words = mark.read_text().split() if mark.exists() else (time.time(), 0.0)
        ready, cpu = map(float, words)
        return 1000 * (ready - self._began[daemon.pid]), 1000 * cpu

    def gated(self, *flags: str) -> subprocess.Popen[str]:
        """A daemon that trains the first of two skills, whose trainer waits for the gate."""
        self.order({WOOD: {"gate": "gate"}})
        daemon = self.start(TO_TABLE, *flags)
        self.started(WOOD, attempt=1)
        return daemon

    def started(self, skill: str, *, attempt: int = 1, not_pid: int = 0) -> run_status.StartRecord:
        """Who runs the skill, once its trainer has told its progress and the daemon knows it."""

        def found() -> run_status.StartRecord | None:
            line = self.line(skill)
            if (line.get("status"), line.get("attempt")) != ("running", attempt):
                return None
            run_paths = self.graph_paths.run(line["expert"], skill)
            start = run_status.read_start(run_paths.folder, line["run_id"])
            whole = start and line["handle"] and start.job_pid and run_paths.progress.exists()
            return start if whole and start and start.runner_pid != not_pid else None

        return until(found, seconds=DEADLINE_SECONDS)

    def line(self, skill: str) -> dict:
        """The skill's line of scheduler_state.json, or nothing."""
        return self.lines().get(skill, {})

    def comes_to(self, skill: str, *statuses: str) -> dict:
        """The skill's line, once its status is one of these."""
        return until(
            lambda: (line := self.line(skill)).get("status") in statuses and line,
            seconds=DEADLINE_SECONDS,
        )

    def tmux(self, *words: str) -> list[str]:
        """What the server of this place answers."""
        command = ["tmux", "-L", "chaos", *words]
        done = subprocess.run(command, env=self.env, check=True, capture_output=True, text=True)
        return done.stdout.splitlines()

    def judged(
        self, fault: str, millis: float, *, skills: int = 2, calls_for: Mapping[str, int]
    ) -> Trial:
        """What came of it; `calls_for` says how often a skill should have been started, if not
        once."""
        manifest = ExpertStore(self.graph_paths).manifest()
        statuses = Counter(self.statuses().values())
        starts = Counter(self.launches())
        return Trial(
            fault=fault,
            millis=millis,
            relaunched=sum(max(0, n - calls_for.get(name, 1)) for name, n in starts.items()),
            lost=max(skills - statuses["completed"], skills - len(self.experts())),
            merged_twice=manifest.generation - len(set(manifest.merged)),
            left_over=len(self.leftovers()),
        )

    def leftovers(self) -> list[Path]:
        """Live run folders and half-made things of a graph in which nothing runs."""
        root = self.graph_paths.root
        found = [*self.graph_paths.training_runs.glob("skill_*")]
        for pattern in ("*.trash", "*.part", ".tmp-*"):
            found += root.rglob(pattern)
        return found

    def end(self) -> None:
        """Kill all that is left."""
        for daemon in self.daemons:
            daemon.kill()
            daemon.wait()
            if daemon.stderr is not None:
                daemon.stderr.close()
        for lock in self.folder.rglob("run.lock"):
            for pid in process.with_open_file(lock):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.CalledProcessError, FileNotFoundError):
            self.tmux("kill-server")
