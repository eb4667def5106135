"""`Launcher`, the base class: starts jobs and finds out how they ended, by their folders."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Collection
from pathlib import Path

from flowrl.errors import LaunchError
from flowrl.launchers import claims, process, run_status
from flowrl.launchers.base import Handle, Job, Outcome
from flowrl.launchers.claims import LOST_SECONDS, Beats, Claim

GRACE_SECONDS = 30.0


class Launcher(ABC):
    """Starts jobs and finds out how they ended; every call is idempotent by run id.

    A job's folder says all but how its runner is started: that is a launcher's own.
    """

    engine = ""  # what runs its jobs; "" is this machine

    def __init__(
        self, *, grace_seconds: float = GRACE_SECONDS, lost_after: float = LOST_SECONDS
    ) -> None:
        self.grace_seconds, self.lost_after = grace_seconds, lost_after
        self.shared_folder = False  # whether other hosts may go on with the graph
        self._beats = Beats()
        self._begun, self._away = set[str](), set[str]()  # runs begun by us; those of other hosts

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
        lease = {}
        if self.engine or self.shared_folder:
            claims.remove_claim(job.folder)
            launch = f"{job.run_id}.{secrets.token_hex(4)}"  # no other launch has it
            lease = {"launch": launch, "lost_after": self.lost_after, "engine": self.engine}
        run_status.prepare(job, grace_seconds=self.grace_seconds, **lease)
        if lease:
            claim = Claim(run_id=job.run_id, launch=launch, engine=self.engine)
            claims.write_claim(job.folder, claim)
        try:
            handle = self._start(job)
        except LaunchError:
            claims.remove_claim(job.folder)
            run_status.withdraw(job)
            raise
        self._begun.add(job.run_id)
        return handle

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
        claim = claims.claim_of(folder, handle.run_id)
        if claim is not None:
            if not self._may_have_ended(claim, handle, folder):
                return None
            claims.remove_claim(folder)
            self._beats.forget(handle.run_id)
        return run_status.outcome(handle, folder)

    def _may_have_ended(self, claim: Claim, handle: Handle, folder: Path) -> bool:
        """Return whether a run in a shared folder is not known to live, here or elsewhere."""
        start = run_status.read_start(folder, handle.run_id)
        self._away.discard(handle.run_id)
        if start.is_here if start else handle.run_id in self._begun:
            runner = (start.runner_pid, start.runner_start_time) if start else ()
            return not process.alive(*(runner or (handle.pid, handle.start_time)))
        record = run_status.read_exit(folder, handle.run_id)
        if record is not None and record.launch == claim.launch:
            return True
        self._away.add(handle.run_id)
        return self._beats.are_still(claim, folder, self.lost_after)

    def stop(self, handle: Handle, folder: Path) -> None:
        """Ask the job to end: TERM, then KILL after a grace period; returns at once."""
        run_status.request_stop(folder)

    def queued(self, handle: Handle) -> str:
        """Return why a launched job has not started yet, "" if it has."""
        return ""

    def wait(self, handles: Collection[Handle], *, timeout_seconds: float) -> bool:
        """Wait until a job may have ended (returns True), or for the timeout (returns False)."""
        here = [handle for handle in handles if handle.run_id not in self._away]
        return process.wait_for_end(here, timeout_seconds=timeout_seconds)

    def clear(self, runs: Path, done: Collection[Path]) -> None:  # noqa: B027 — most show nothing
        """Close what shows the ended jobs below `runs` that are `done`; LaunchError: not now."""

    def close(self) -> None:  # noqa: B027 — most hold nothing
        """Release what the launcher holds in this process; jobs go on."""
