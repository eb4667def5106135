"""The executor of the scheduler's commands; it reports their results as events.

Changes of status go to the log and to events.jsonl, in words for people and as JSON.

An error that one skill's files or code can raise (`errors.SKILL_ERRORS`) becomes an event of that
skill; the others go on. A damaged manifest or lock is of no one skill and ends the daemon. So does
any other exception, which is a bug. Runs go on.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from flowrl import storage
from flowrl.errors import (
    SKILL_ERRORS,
    BusyError,
    FileRefusedError,
    FlowrlError,
    GraphDamagedError,
    LaunchError,
    ResultRefusedError,
    classify_io_error,
    format_error,
    is_os_error,
    is_transient,
)
from flowrl.launchers.base import ExitCause, Exited, Finished, Handle, Job, Lost
from flowrl.launchers.launcher import Launcher
from flowrl.parallel import events
from flowrl.parallel.events import Event, RunCommand, RunRequest, StatusChange
from flowrl.parallel.health import DiskHealth, RunLimits, read_log_tail
from flowrl.parallel.status import (
    Entry,
    Failed,
    Merging,
    Preparing,
    Running,
    Status,
    StopReason,
    sentence,
)
from flowrl.paths import RunPaths
from flowrl.runs import Progress, RunResult, progress_of, read_result, write_progress

logger = logging.getLogger(__name__)
_CHECKPOINT = re.compile("[0-9]{1,9}")
_LOGGED = (
    *("attempt", "run_id", "devices", "why", "blocked_by"),
    *("frames", "success_rate", "wall_seconds"),
)


class Backend(Protocol):
    """Prepares runs and merges them; every call may be repeated after a crash.

    A FlowrlError or an OSError raised here concerns this one skill; BusyError and a full disk
    mean "try again later".
    """

    def prepare(self, request: RunRequest, /) -> Job:
        """Prepare a new run of this attempt; what an earlier one left is moved away."""
        ...

    def resume(self, request: RunRequest, /) -> Job:
        """Make run `request.run_id` ready to be launched once more, in its own folder."""
        ...

    def reopen(self, request: RunRequest, /) -> Job | None:
        """Return a run's job as it is; None without a folder, FileRefusedError if damaged."""
        ...

    def merge(self, request: RunRequest, /) -> Mapping[str, Any]:
        """Merge the run once; return its `run_id`, and perhaps facts of `MergeDone`."""
        ...

    def archive(self, request: RunRequest, /) -> object:
        """Archive a merged run, once the runs that waited for it have been started."""
        ...

    def archived_result(self, request: RunRequest, /) -> RunResult | None:
        """Return the result of run `request.run_id` if it was merged and archived."""
        ...

    def discard(self, request: RunRequest, /) -> object:
        """Move the folder of a failed attempt away."""
        ...


class CommandExecutor:
    """Calls the launcher and the backend; knows the job of each run."""

    def __init__(
        self, launcher: Launcher, backend: Backend, limits: RunLimits, disk: DiskHealth
    ) -> None:
        self.launcher = launcher
        self._backend = backend
        self._limits = limits
        self._disk = disk
        self._jobs: dict[str, Job] = {}  # by skill
        self._stopping: set[str] = set()  # runs that have been asked to end
        self.stop_is_owed = False  # in this tick a run that has to end was only starting
        self._unarchived: list[RunRequest] = []  # merged runs

    def carry_out(self, command: RunCommand, status: Status) -> Sequence[Event]:
        """Carry out a command, unless its skill has another `status` by now."""
        match command:
            case events.Discard(request):
                self.discard(request)
            case events.Prepare(request) if _fits(request, status, Preparing):
                return self.prepare(request)
            case events.Launch(request, seek) if _fits(request, status, Running):
                # One that was found alive while it was prepared has its handle already.
                found_alive = isinstance(status, Running) and status.handle is not None
                return () if found_alive else self.launch(request, seek=seek)
            case events.Merge(request) if _fits(request, status, Merging):
                return self.merge(request)
            case events.StopRun(request) if isinstance(status, Running) and _fits(
                request, status, Running
            ):
                self.stop_run(request, status.stop_reason)
            case _:
                pass
        return ()

    def prepare(self, request: RunRequest) -> Sequence[Event]:
        """Make the run's folder, or reopen that of a run that is to go on."""
        try:
            job = self._reopened(request) if request.run_id else None
            handle = self.launcher.find(job) if job else None
            if job and handle and not isinstance(self._end_of(request, job, handle), Exited | Lost):
                # It lives, or has finished after all.
                self._jobs[request.skill] = job
                prepared = events.RunPrepared(request.skill, job.run_id)
                return prepared, events.RunLaunched(request.skill, job.run_id, handle)
            job = self._backend.resume(request) if job else self._backend.prepare(request)
        except SKILL_ERRORS as error:
            return (self._not_started(request, error, preparing=True),)
        storage.fault_point("scheduler.prepared")
        self._jobs[request.skill] = job
        return (events.RunPrepared(request.skill, job.run_id),)

    def launch(self, request: RunRequest, *, seek: bool) -> Sequence[Event]:
        """Start the run; with `seek`, only if it was not started before."""
        try:
            job = self._job(request)
            if job is None:
                return (self._without_folder(request),)
            handle = (self.launcher.find(job) if seek else None) or self.launcher.launch(job)
        except SKILL_ERRORS as error:
            return (self._not_started(request, error, preparing=False),)
        storage.fault_point("scheduler.launched")
        return (events.RunLaunched(request.skill, job.run_id, handle),)

    def merge(self, request: RunRequest) -> Sequence[Event]:
        """Merge the run."""
        assert request.run_id is not None
        try:
            summary = self._backend.merge(request)
            run_id = summary.get("run_id", request.run_id)
            if run_id != request.run_id:
                raise ResultRefusedError(f"found run {run_id} instead of {request.run_id}")
        except SKILL_ERRORS as error:
            self._report(request, error)
            if isinstance(error, BusyError) or is_transient(error):
                return (events.Deferred(request.skill, format_error(error)),)
            return (events.MergeRefused(request.skill, request.run_id, format_error(error)),)
        storage.fault_point("scheduler.merged")
        self._unarchived.append(request)
        self._jobs.pop(request.skill, None)
        names = ("goal", "budget", "taken", "early")
        facts = {name: summary[name] for name in names if name in summary}
        return (events.MergeDone(request.skill, request.run_id, **facts),)

    def archive_merged(self) -> None:
        """Archive merged runs; one that cannot be archived now is tried again at the next tick."""
        left, self._unarchived = self._unarchived, []
        for request in left:
            try:
                self._backend.archive(request)
            except SKILL_ERRORS as error:
                self._report(request, error)
                if not isinstance(error, FlowrlError) or isinstance(error, BusyError):
                    self._unarchived.append(request)
                _warn("its run folder stays", request.skill, error)

    def stop_once(self, entry: Entry) -> None:
        """Ask a running skill's run to end, once."""
        status = entry.status
        if isinstance(status, Running) and status.run_id not in self._stopping:
            self.stop_run(_request(entry, status), status.stop_reason)

    def stop_run(self, request: RunRequest, reason: StopReason) -> None:
        """Ask the run to end; one that cannot be reached now is asked again at the next tick."""
        try:
            job = self._job(request)
            if job is None:
                return
            if (handle := self.launcher.find(job)) is None:
                self.stop_is_owed = True
                return
            if reason is StopReason.PRUNE:
                storage.write_json(RunPaths(job.folder, request.expert).prune_json, {})
            self.launcher.stop(handle, job.folder)
            self._stopping.add(handle.run_id)
        except (FlowrlError, OSError) as error:
            _warn("it cannot be stopped now", request.skill, error)

    def discard(self, request: RunRequest) -> None:
        """Move a failed attempt's folder away; one that stays is moved by the next attempt."""
        self._jobs.pop(request.skill, None)
        try:
            self._backend.discard(request)
        except SKILL_ERRORS as error:
            _warn("its run folder stays", request.skill, error)

    def poll_run(self, entry: Entry) -> Sequence[Event]:
        """Return how the entry's run ended, or that it hangs; nothing while all is well."""
        status = entry.status
        if not isinstance(status, Running) or status.handle is None:
            return ()
        request = _request(entry, status)
        try:
            job = self._job(request)
            if job is None:
                return (self._without_folder(request),)
            outcome = self._end_of(request, job, status.handle)
            if outcome is None:
                return self._check_limits(entry, job, status)
            ended = self._ended(request, job, outcome)
        except SKILL_ERRORS as error:
            _warn("it cannot be looked at now", entry.skill, error)
            return ()
        self._limits.forget(status.run_id)
        self._stopping.discard(status.run_id)
        return (ended,)

    def _ended(self, request: RunRequest, job: Job, outcome: RunResult | Exited | Lost) -> Event:
        if isinstance(outcome, RunResult):
            return events.RunEnded(request.skill, job.run_id, outcome, outcome.frames)
        run_paths = RunPaths(job.folder, request.expert)
        progress, tail = progress_of(run_paths, job.run_id), read_log_tail(run_paths.training_log)
        frames, saved = (progress.frames if progress else 0), newest_checkpoint(run_paths)
        self._disk.check()
        full = not self._disk.ok
        return events.RunEnded(request.skill, job.run_id, outcome, frames, tail, saved, full)

    def _without_folder(self, request: RunRequest) -> Event:
        """The run's folder is gone or damaged: it was merged and archived, or it is lost."""
        assert request.run_id is not None
        why = "its run folder is gone"
        try:
            self._backend.reopen(request)
        except FileRefusedError as error:
            why = str(error)
        outcome = self._backend.archived_result(request) or Lost(why)
        return events.RunEnded(request.skill, request.run_id, outcome)

    def _end_of(
        self, request: RunRequest, job: Job, handle: Handle
    ) -> RunResult | Exited | Lost | None:
        """Return how the run ended, None while it lives; a valid result counts anyhow."""
        outcome = self.launcher.poll(handle, job.folder)
        if outcome is None:
            return None
        try:
            result = read_result(RunPaths(job.folder, request.expert))
        except FileRefusedError as error:
            why = str(error)
        else:
            if result.run_id == job.run_id:
                return result
            why = f"result.json is of run {result.run_id}"
        if not isinstance(outcome, Finished):
            return outcome
        return Exited(cause=ExitCause.NO_RESULT, code=0, detail=why)

    def _check_limits(self, entry: Entry, job: Job, status: Running) -> Sequence[Event]:
        """Report a run's silence or age; a request to end is repeated until it arrives."""
        if status.stop_reason:
            self.stop_once(entry)
            return ()
        handle = status.handle
        if handle is not None and (why := self.launcher.queued(handle)):
            self._limits.forget_queued(job.run_id)
            self._report_queued(RunPaths(job.folder, entry.expert or 0), job.run_id, why)
            return ()
        if handle is not None and self._limits.seconds_left(handle, job.limit_seconds) < 0:
            return (events.RunLate(entry.skill, job.run_id, StopReason.OVERDUE),)
        run_paths = RunPaths(job.folder, entry.expert or 0)
        progress = None if status.trains_since else progress_of(run_paths, job.run_id)
        if progress and progress.steps_per_second > 0:  # as it is after a launch's first update
            return (events.RunTrains(entry.skill, job.run_id),)
        if self._limits.is_silent(job.run_id, run_paths.progress):
            if self._disk.ok:
                return (events.RunLate(entry.skill, job.run_id, StopReason.HUNG),)
            self._limits.forget(job.run_id)  # it cannot write its progress either
        return ()

    def _report_queued(self, run_paths: RunPaths, run_id: str, why: str) -> None:
        """Write what a launched run waits for where its trainer writes its progress later."""
        known = progress_of(run_paths, run_id)
        if known is None or known.waits_for != why:
            facts = {"run_id": run_id, "updates": 0, "step_success": (), "phase": "queued"}
            began = (time.monotonic(), 0)
            queued = Progress.since(began, frames=0, total_frames=0, waits_for=why, **facts)
            write_progress(run_paths, queued)

    def _report(self, request: RunRequest, error: BaseException) -> None:
        """A full disk pauses all work; an unexpected error is logged with its traceback.

        GraphDamagedError is raised again: until it is mended, every skill would be refused.
        """
        if isinstance(error, GraphDamagedError):
            raise error
        self._disk.report(error)
        if not isinstance(error, FlowrlError | OSError):
            logger.error("%s: %s", request.skill, format_error(error), exc_info=error)

    def _not_started(self, request: RunRequest, error: BaseException, *, preparing: bool) -> Event:
        """The event that says whether and when to try again."""
        self._report(request, error)
        if isinstance(error, BusyError) or classify_io_error(error) == "disk":
            return events.Deferred(request.skill, format_error(error))
        again = isinstance(error, LaunchError) or is_os_error(error) or is_transient(error)
        if preparing and not again:
            return events.PrepareRefused(request.skill, format_error(error))
        return events.LaunchRefused(request.skill, format_error(error))

    def _job(self, request: RunRequest) -> Job | None:
        known = self._jobs.get(request.skill)
        if known is None or known.run_id != request.run_id:
            known = self._reopened(request)
        if known is not None:
            self._jobs[request.skill] = known
        return known

    def _reopened(self, request: RunRequest) -> Job | None:
        """The run's job, if it has a whole folder."""
        try:
            return self._backend.reopen(request)
        except FileRefusedError as error:
            if is_transient(error):
                raise
            logger.error("%s: %s", request.skill, error)
            return None


def _warn(what: str, skill: str, error: BaseException) -> None:
    logger.warning("%s: %s", skill, what, extra={"why": format_error(error)})


def _fits(request: RunRequest, status: Status, kind: type) -> bool:
    return isinstance(status, kind) and request.run_id == status.run_id


def _request(entry: Entry, status: Running) -> RunRequest:
    assert entry.expert is not None
    return RunRequest(
        skill=entry.skill,
        expert=entry.expert,
        attempt=status.attempt,
        run_id=status.run_id,
        devices=status.devices,
    )


def newest_checkpoint(run_paths: RunPaths) -> int:
    """Return the number of the newest checkpoint or round that the run has saved; 0 without."""
    names = [path.name for path in run_paths.folder.glob("*_policies/resume/*")]
    names += [path.parent.name for path in run_paths.rounds.glob("*/round.json")]
    return max((int(name) + 1 for name in names if _CHECKPOINT.fullmatch(name)), default=0)


# Changes of status


def log_change(path: Path, change: StatusChange, now: datetime) -> None:
    """Write a change of status to the log and to events.jsonl; no decision depends on either.

    The beginnings of preparing and merging are in events.jsonl alone.
    """
    entry, text = change.entry, sentence(change.before, change.entry, now)
    if not (text or isinstance(entry.status, Preparing | Merging)):
        return
    data = {
        "at": now.isoformat().replace("+00:00", "Z"),
        "skill": entry.skill,
        "before": _kind(change.before),
        "status": entry.status.kind,
        "expert": entry.expert,
        **{name: getattr(entry.status, name) for name in _LOGGED if hasattr(entry.status, name)},
        "text": text,
    }
    level = logging.WARNING if isinstance(entry.status, Failed) else logging.INFO
    if text:
        logger.log(level, "%s %s", entry.skill, text, extra={"change": data})
    try:
        storage.append_line(path, json.dumps(data, ensure_ascii=False))
    except OSError as error:
        logger.warning("events.jsonl is not written: %s", format_error(error))


def _kind(status: Status | None) -> str | None:
    """Return the word of the status before; a run that is only about to be launched is no news."""
    launching = isinstance(status, Running) and status.handle is None
    return "preparing" if launching else status and status.kind
