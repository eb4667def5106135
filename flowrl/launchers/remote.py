"""`EngineLauncher`, the base class: jobs that an engine (Slurm, Ray) starts on any of its hosts.

The truth stays in the files that the runner writes. The engine adds what only it can know: that a
job still waits in its queue, and why one has ended that left no record. A run is dead once it has
left no record and its beat has stopped, for a while if the engine says that it has ended, for
`lost_after` seconds if the engine does not answer. Beats are timed by this machine's clock, from
one look to the next, so clocks of hosts may differ.
"""

from __future__ import annotations

import shlex
import time
from abc import abstractmethod
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from flowrl import storage
from flowrl.errors import BusyError
from flowrl.launchers import claims, run_status
from flowrl.launchers.base import ExitCause, Exited, Handle, Job, Lost, Outcome
from flowrl.launchers.claims import BEAT_SECONDS, LOST_SECONDS, Claim
from flowrl.launchers.launcher import Launcher
from flowrl.paths import JobPaths

SAVE_SECONDS = 20.0  # for a run that is asked to end: engines kill after 30
LISTED_SECONDS = 10.0  # for which one answer of the engine about all its jobs is used
_STILL_SECONDS = 2 * BEAT_SECONDS  # without a beat, of a run that has ended by its engine's word
_LOOK_SECONDS = 0.25  # between two looks for the record of an end
_AGAIN_SECONDS = 1.0  # until the engine is asked again about a run that was ended


class UnansweredError(BusyError):
    """The engine does not answer; what was asked of it may have happened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineJob:
    """An engine's view of a job: it is queued, it lives, or for which cause it has ended."""

    id: str
    queued: str = ""  # why it has not started, in the engine's words
    live: bool = False
    host: str = ""  # where it was started, if it was and the engine says so
    cause: ExitCause | None = None  # None, too, if the engine only says that it has ended
    detail: str = ""


class EngineLauncher(Launcher):
    """The Launcher of an engine; the graph's folder has the same path on all its hosts."""

    def __init__(
        self, *, lost_after: float = LOST_SECONDS, grace_seconds: float = SAVE_SECONDS
    ) -> None:
        super().__init__(grace_seconds=grace_seconds, lost_after=lost_after)
        self._jobs: Mapping[str, EngineJob] = {}  # by launch
        self._silence = ""  # why it has listed none
        self._listed_at = float("-inf")
        self._folders: dict[str, Path] = {}  # by run id

    @abstractmethod
    def submit(self, job: Job, launch: str) -> str:
        """Have the engine start the runner; returns the engine's id of the job.

        LaunchError: it refuses. UnansweredError: nobody knows whether it has taken the job.
        """

    @abstractmethod
    def list_jobs(self) -> Mapping[str, EngineJob]:
        """Return this user's jobs by launch, in one call; UnansweredError."""

    @abstractmethod
    def cancel(self, job: EngineJob) -> None:
        """Take a job out of the queue, or pass SIGTERM to its runner; UnansweredError."""

    def _start(self, job: Job) -> Handle:
        claim = claims.claim_of(job.folder, job.run_id)
        assert claim is not None
        try:
            claim = replace(claim, engine_id=self.submit(job, claim.launch))
        except UnansweredError:
            self._listed_at = float("-inf")  # a list from before does not say whether it was taken
            raise
        return self._handle(job, claims.write_claim(job.folder, claim))

    def find(self, job: Job) -> Handle | None:
        """Return the run that the engine has; None if it was never submitted.

        UnansweredError: only the engine knows, and does not answer.
        """
        claim = claims.claim_of(job.folder, job.run_id)
        if claim is None:
            return self._find_unclaimed(job)
        if not claim.engine:
            return super().find(job)
        if not claim.engine_id:
            known = self._look(anew=True).get(claim.launch)
            if known is None and not JobPaths(job.folder).beat.exists():
                claims.remove_claim(job.folder)  # it keeps the run's folder from being used
                return None
            claim = replace(claim, engine_id=known.id if known else "")
            claims.write_claim(job.folder, claim)
        return self._handle(job, claim)

    def _find_unclaimed(self, job: Job) -> Handle | None:
        """Return a run that has recorded its end, or that another launcher started here."""
        start = run_status.read_start(job.folder, job.run_id)
        recorded = run_status.read_exit(job.folder, job.run_id)
        return super().find(job) if recorded or (start and not start.launch) else None

    def poll(self, handle: Handle, folder: Path) -> Outcome | None:
        """Return the outcome, or None while the run may live or waits in the engine's queue."""
        self._folders[handle.run_id] = folder
        claim = claims.claim_of(folder, handle.run_id)
        if claim is None or not claim.engine:
            return super().poll(handle, folder)
        outcome = self._outcome(handle, claim, folder)
        if outcome is not None and not JobPaths(folder).exit_json.exists():
            with suppress(OSError):  # a network file system looks again at names that it hides
                storage.try_writing(folder)
            outcome = self._outcome(handle, claim, folder)
        if outcome is not None:
            self._folders.pop(handle.run_id, None)
            self._beats.forget(handle.run_id)
            claims.remove_claim(folder)
            run_status.forget_secrets(JobPaths(folder))
            storage.remove_part_files(folder)
        return outcome

    def _outcome(self, handle: Handle, claim: Claim, folder: Path) -> Outcome | None:
        record = run_status.read_exit(folder, handle.run_id)
        if record and record.launch != claim.launch:
            record = None  # of a launch that was taken for lost, and came to write it late
        recorded = run_status.recorded_end(record, handle, folder) if record else None
        stopped = isinstance(recorded, Exited) and recorded.cause is ExitCause.STOPPED
        if recorded and not stopped:  # else its engine may say by whom
            return recorded
        return self._outcome_by_engine(claim, folder, recorded)

    def _outcome_by_engine(
        self, claim: Claim, folder: Path, recorded: Outcome | None
    ) -> Outcome | None:
        """Return how a run ended by what its engine adds; None while it may live."""
        unstarted = not JobPaths(folder).beat.exists()
        try:
            job = self._look(anew=recorded is not None).get(claim.launch)
            cut_off = job and job.cause is ExitCause.SERVER_KILLED and not unstarted
            patience = _STILL_SECONDS + (self.lost_after / 2 if cut_off else 0.0)  # its lease
            unknown = f"{self.engine} does not know it any more"
        except UnansweredError as error:
            if unstarted and not claim.stop:
                return None  # it may be queued
            job, patience, unknown = None, self.lost_after, str(error)
        if claim.stop and unstarted and (job is None or job.queued):
            # If it starts after all, it finds no claim.
            return Exited(cause=ExitCause.STOPPED, detail="stopped while it was queued")
        live = job is not None and job.live
        if live or not (recorded or self._beats.are_still(claim, folder, patience)):
            return None
        if claim.stop:
            return recorded or Exited(cause=ExitCause.STOPPED, detail="stopped on request")
        by_hand = job is not None and job.cause is ExitCause.SESSION_KILLED
        if job is not None and by_hand and not recorded and (job.host or not unstarted):
            return Lost(job.detail)  # a runner records that; a confused engine says the same
        if job is not None and job.cause is not None:
            code = recorded.code if isinstance(recorded, Exited) else None
            return Exited(cause=job.cause, code=code, detail=job.detail)
        return recorded or Lost(_unrecorded(job, unstarted=unstarted) if job else unknown)

    def queued(self, handle: Handle) -> str:
        """Return why the engine has not started a run yet, "" once it has, or if it is unknown."""
        folder = self._folders.get(handle.run_id)
        if folder is None or JobPaths(folder).beat.exists():  # the list of jobs may be older
            return ""
        claim = claims.claim_of(folder, handle.run_id)
        job = self._jobs.get(claim.launch) if claim else None
        return job.queued if job else self._silence

    def stop(self, handle: Handle, folder: Path) -> None:
        """Ask the run to end by its claim, which its runner reads, and by the engine."""
        super().stop(handle, folder)
        claim = claims.claim_of(folder, handle.run_id)
        if claim and (job := self._look(anew=True).get(claim.launch)):
            self.cancel(job)

    def wait(self, handles: Collection[Handle], *, timeout_seconds: float) -> bool:
        """Wait until a run has recorded its end (returns True), or for the timeout."""
        until = time.monotonic() + timeout_seconds
        folders = [self._folders[one.run_id] for one in handles if one.run_id in self._folders]
        while (left := until - time.monotonic()) > 0:
            time.sleep(min(left, _LOOK_SECONDS))  # first: the engine may not say yet that one ended
            if any(_is_written(JobPaths(folder).exit_json) for folder in folders):
                return True
        return False

    def _handle(self, job: Job, claim: Claim) -> Handle:
        self._folders[job.run_id] = job.folder
        return Handle(
            run_id=job.run_id,
            session=job.name,
            pid=0,
            engine=self.engine,
            engine_id=claim.engine_id,
        )

    def _look(self, *, anew: bool = False) -> Mapping[str, EngineJob]:
        """Return the engine's jobs as it listed them, at most ten seconds ago.

        UnansweredError: it did not answer then; many runs wait for one call.
        """
        if time.monotonic() - self._listed_at > (_AGAIN_SECONDS if anew else LISTED_SECONDS):
            try:
                self._jobs, self._silence = self.list_jobs(), ""
            except UnansweredError as error:
                self._silence = str(error)
            self._listed_at = time.monotonic()
        if self._silence:
            raise UnansweredError(self._silence)
        return self._jobs


def _is_written(record: Path) -> bool:
    """Return whether a record is there; a sandbox keeps its place by an empty file."""
    try:
        return record.stat().st_size > 0
    except FileNotFoundError:
        return False


def runner_line(job: Job) -> str:
    """Return a line of bash that becomes the runner, with the log's writer at its output."""
    runner, log = map(shlex.join, (run_status.runner_words(job), run_status.log_words(job)))
    return f"exec {runner} > >(exec {log}) 2>&1"


def _unrecorded(job: EngineJob, *, unstarted: bool) -> str:
    """Return what is known of a job that left no record; its host may not see the folder."""
    if not unstarted:
        return job.detail
    return (
        f"{job.host or 'its host'} has written nothing to the graph's folder: it, flowrl and "
        f"Python must have the same paths on all hosts; {job.detail}"
    )
