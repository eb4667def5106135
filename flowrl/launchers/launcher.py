"""`Launcher`, the base class: starts jobs and finds out how they ended, by their folders."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from pathlib import Path

from flowrl.errors import LaunchError
from flowrl.launchers import run_status
from flowrl.launchers.base import Handle, Job, Outcome
from flowrl.launchers.process import wait_for_end

GRACE_SECONDS = 30.0


class Launcher(ABC):
    """Starts jobs and finds out how they ended; every call is idempotent by run id.

    A job's folder says all but how its runner is started: that is a launcher's own.
    """

    def __init__(self, *, grace_seconds: float = GRACE_SECONDS) -> None:
        self.grace_seconds = grace_seconds

    @abstractmethod
    def _start(self, job: Job) -> Handle:
        """Start the runner of a job whose folder is prepared, or raise LaunchError."""

    def launch(self, job: Job) -> Handle:
        """Start a job; one that lives already is adopted, one that ended is started anew.

        Raises LaunchError if it could not be started; no process of it lives then.
        """
        known = self.find(job)
        if known is not None and self.poll(known, job.folder) is None:
            return known
        run_status.prepare(job, grace_seconds=self.grace_seconds)
        try:
            return self._start(job)
        except LaunchError:
            run_status.withdraw(job)
            raise

    def find(self, job: Job) -> Handle | None:
        """A job that was launched before, for instance by an earlier daemon.

        None means that it never started, or left no record: launch it.
        """
        start = run_status.read_start(job.folder, job.run_id)
        if start is None:
            return None
        return Handle(
            run_id=job.run_id,
            session=job.name,
            pid=start.runner_pid,
            start_time=start.runner_start_time,
            pane=start.pane,
            server_pid=start.server_pid,
        )

    def poll(self, handle: Handle, folder: Path) -> Outcome | None:
        """Return the outcome, or None while a process of the job lives; orphans are ended here.

        Raises OSError if it cannot be looked at now, for instance for lack of file descriptors.
        """
        return run_status.outcome(handle, folder)

    def stop(self, handle: Handle, folder: Path) -> None:
        """Ask the job to end: TERM, then KILL after a grace period; returns at once."""
        run_status.request_stop(folder)

    def queued(self, handle: Handle) -> str:
        """Return why a launched job has not started yet, "" if it has."""
        return ""

    def wait(self, handles: Collection[Handle], *, timeout_seconds: float) -> bool:
        """Wait until a job may have ended (returns True), or for the timeout (returns False)."""
        return wait_for_end(handles, timeout_seconds=timeout_seconds)

    def clear(self, runs: Path, done: Collection[Path]) -> None:  # noqa: B027 — most show nothing
        """Close what shows the ended jobs below `runs` that are `done`; LaunchError: not now."""

    def close(self) -> None:  # noqa: B027 — most hold nothing
        """Release what the launcher holds in this process; jobs go on."""
