"""Runs as plain detached processes: without tmux, for tests and for small machines.

They outlive the daemon like tmux sessions do, in a session of their own, but nobody can attach.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

from flowrl.errors import LaunchError
from flowrl.launchers import files, processes
from flowrl.launchers.job import Handle, Job, Outcome
from flowrl.launchers.waiting import EndWatcher
from flowrl.paths import RunPaths

GRACE_SECONDS = 30.0


class LocalLauncher:
    """The Launcher without tmux."""

    def __init__(self, *, grace_seconds: float = GRACE_SECONDS) -> None:
        self._grace_seconds = grace_seconds
        self._watcher = EndWatcher()
        self._children: list[subprocess.Popen] = []

    def launch(self, job: Job) -> Handle:
        """Start a run in a process of its own; its output goes to training.log."""
        known = files.found(job)
        if known is not None and files.outcome(known, job.folder) is None:
            return known
        files.prepare(job, grace_seconds=self._grace_seconds)
        try:
            pid = self._spawn(job)
        except OSError as error:
            raise LaunchError(f"{job.name} cannot be started: {error}") from error
        return Handle(run_id=job.run_id, session=job.name, pid=pid, birth=processes.birth_of(pid))

    def find(self, job: Job) -> Handle | None:
        """A run that was launched before, whether it lives or has ended."""
        return files.found(job)

    def poll(self, handle: Handle, folder: Path) -> Outcome | None:
        """How the run ended, or None while it lives."""
        self._reap()
        return None if self._watcher.sees_alive(handle) else files.outcome(handle, folder)

    def cancel(self, handle: Handle, folder: Path) -> None:
        """Ask the run to end; returns at once."""
        files.stop(folder)

    def wait(self, handles: Collection[Handle], *, timeout_seconds: float) -> None:
        """Return as soon as one of the runs may have ended, or after the timeout."""
        self._watcher.wait(handles, timeout_seconds=timeout_seconds)

    def close(self) -> None:
        """Release what has ended; runs go on."""
        self._watcher.close()
        self._reap()
        for child in self._children:
            child.returncode = 0  # it goes on without us: Popen must not warn about it
        self._children.clear()

    def _spawn(self, job: Job) -> int:
        """Start the runner with its output in a capped log; returns the runner's pid."""
        place = RunPaths(job.folder.absolute(), expert=0)
        log = self._python(job, files.CAPPED_LOG, place.training_log, stdin=subprocess.PIPE)
        try:
            runner = self._python(job, files.RUNNER, place.spec_json, stdout=log.stdin)
        finally:
            if log.stdin is not None:
                log.stdin.close()
        return runner.pid

    def _python(self, job: Job, script: Path, path: Path, **streams) -> subprocess.Popen:
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", str(script), str(path)],
            env=dict(job.env),
            start_new_session=True,
            stderr=streams.get("stdout", subprocess.DEVNULL),
            **{"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, **streams},
        )
        self._children.append(child)
        return child

    def _reap(self) -> None:
        """Collect ended children, so that none stays a zombie."""
        self._children = [child for child in self._children if child.poll() is None]
