"""Jobs as plain detached processes: for machines without tmux, for comparisons and for tests.

They outlive the daemon as tmux sessions do, in a session of their own, but nobody can attach.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

from flowrl.errors import LaunchError
from flowrl.launchers import process, run_status
from flowrl.launchers.base import Handle, Job, Outcome
from flowrl.launchers.process import EndWatcher
from flowrl.paths import JobPaths


class LocalLauncher:
    """The Launcher without tmux."""

    def __init__(self, *, grace_seconds: float = run_status.GRACE_SECONDS) -> None:
        self._grace_seconds = grace_seconds
        self._watcher = EndWatcher()
        self._children: list[subprocess.Popen] = []

    def launch(self, job: Job) -> Handle:
        """Start a job in a process of its own; its output goes to its log."""
        known = run_status.find_living(job)
        if known is not None:
            return known
        run_status.prepare(job, grace_seconds=self._grace_seconds)
        try:
            pid = self._spawn(job)
        except OSError as error:
            raise LaunchError(f"{job.name} cannot be started: {error}") from error
        start_time = process.start_time_of(pid)
        return Handle(run_id=job.run_id, session=job.name, pid=pid, start_time=start_time)

    def find(self, job: Job) -> Handle | None:
        """A job that was launched before, whether it lives or has ended."""
        return run_status.find(job)

    def poll(self, handle: Handle, folder: Path) -> Outcome | None:
        """How the job ended, or None while it lives."""
        self._reap()
        if self._watcher.sees_alive(handle):
            return None
        return run_status.outcome(handle, folder)

    def stop(self, handle: Handle, folder: Path) -> None:
        """Ask the job to end; returns at once."""
        run_status.request_stop(folder)

    def wait(self, handles: Collection[Handle], *, timeout_seconds: float) -> bool:
        """Wait until a job may have ended (returns True), or for the timeout (returns False)."""
        return self._watcher.wait(handles, timeout_seconds=timeout_seconds)

    def close(self) -> None:
        """Release what has ended; jobs go on."""
        self._watcher.close()
        self._reap()
        for child in self._children:
            child.returncode = 0  # it goes on without us: Popen must not warn about it
        self._children.clear()

    def _spawn(self, job: Job) -> int:
        """Start the runner with its output piped to the log's writer; returns the runner's pid."""
        log_path = (job.folder / job.log).absolute()
        log = self._python(job, run_status.LOG_WRITER, log_path, stdin=subprocess.PIPE)
        try:
            spec_json = JobPaths(job.folder.absolute()).spec_json
            return self._python(job, run_status.RUNNER, spec_json, stdout=log.stdin).pid
        finally:
            if log.stdin is not None:
                log.stdin.close()

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
