"""Carrying out commands: what was ordered is done, and how it went comes back as events.

A FlowrlError or an OSError of one skill ends here, as that skill's event; others go on.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from flowrl import durable
from flowrl.errors import BusyError, FileRefusedError, FlowrlError, LaunchError, ResultRefusedError
from flowrl.launch.job import Finished, Handle, Job, Launcher, Lost, Outcome
from flowrl.layout import RunLayout
from flowrl.parallel import signals
from flowrl.parallel.heartbeat import Heartbeats
from flowrl.parallel.signals import Command, Event, Task
from flowrl.parallel.status import Entry, Merging, Preparing, Running, Status
from flowrl.parallel.workshop import Workshop
from flowrl.runs import read_progress

logger = logging.getLogger(__name__)
DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
# What a merge waits for to pass, since the run's work would be lost with it.
_PASSING = DISK_FULL | {
    errno.EACCES,
    errno.EAGAIN,
    errno.EIO,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.EPERM,
    errno.EROFS,
    errno.ESTALE,
}


class Acts:
    """The launcher's and the workshop's side of the scheduler; knows the job of each run."""

    def __init__(self, launcher: Launcher, workshop: Workshop, heartbeats: Heartbeats) -> None:
        self.launcher = launcher
        self._workshop = workshop
        self._heartbeats = heartbeats
        self._jobs: dict[str, Job] = {}  # by skill
        self._stopped: set[str] = set()  # runs that were asked to end

    def carry_out(self, command: Command, status: Status) -> Sequence[Event]:
        """Do what was ordered, unless its skill has moved on to another `status` since."""
        match command:
            case signals.Discard(task):
                self.discard(task)
            case signals.Prepare(task) if _fits(task, status, Preparing):
                return self.prepare(task)
            case signals.Launch(task, seek) if _fits(task, status, Running):
                # One that was found alive while it was prepared has its handle already.
                handle = getattr(status, "handle", None)
                return self.launch(task, seek=seek) if handle is None else ()
            case signals.Merge(task) if _fits(task, status, Merging):
                return self.merge(task)
            case signals.Cancel(task) if _fits(task, status, Running):
                self.cancel(task)
            case _:
                pass
        return ()

    def prepare(self, task: Task) -> Sequence[Event]:
        """Make or reopen the run's folder."""
        try:
            found = self._living(task) if task.run_id else None
            if found is not None:
                return (signals.RunPrepared(task.skill, found.run_id), _launched(task, found))
            job = self._made(task)
        except (BusyError, LaunchError) as error:
            later = signals.PutOff if isinstance(error, BusyError) else signals.LaunchRefused
            return (later(task.skill, str(error)),)
        except FlowrlError as error:
            return (signals.PrepareRefused(task.skill, str(error)),)
        except OSError as error:
            later = signals.PutOff if error.errno in DISK_FULL else signals.LaunchRefused
            return (later(task.skill, _said(error)),)
        durable.fault_point("scheduler.prepared")
        self._jobs[task.skill] = job
        return (signals.RunPrepared(task.skill, job.run_id),)

    def launch(self, task: Task, *, seek: bool) -> Sequence[Event]:
        """Start the run; with `seek`, only if it was not started before."""
        try:
            job = self._job(task)
            if job is None:
                return self._without_folder(task)
            handle = (self.launcher.find(job) if seek else None) or self.launcher.launch(job)
        except FlowrlError as error:
            return (signals.LaunchRefused(task.skill, str(error)),)
        except OSError as error:
            later = signals.PutOff if error.errno in DISK_FULL else signals.LaunchRefused
            return (later(task.skill, _said(error)),)
        durable.fault_point("scheduler.launched")
        return (_launched(task, handle),)

    def merge(self, task: Task) -> Sequence[Event]:
        """Merge the run."""
        assert task.run_id is not None
        try:
            self._merged(task)
        except BusyError as error:
            return (signals.PutOff(task.skill, str(error)),)
        except FlowrlError as error:
            return (signals.MergeRefused(task.skill, task.run_id, str(error)),)
        except OSError as error:
            if error.errno in _PASSING:
                return (signals.PutOff(task.skill, _said(error)),)
            return (signals.MergeRefused(task.skill, task.run_id, _said(error)),)
        durable.fault_point("scheduler.merged")
        self._jobs.pop(task.skill, None)
        return (signals.MergeDone(task.skill, task.run_id),)

    def stop(self, entry: Entry) -> None:
        """Ask a running entry's run to end, once."""
        status = entry.status
        if not isinstance(status, Running) or entry.expert is None:
            return
        if status.run_id not in self._stopped:
            self._stopped.add(status.run_id)
            self.cancel(_task(entry, entry.expert, status))

    def cancel(self, task: Task) -> None:
        """Ask the run to end; when it cannot be reached now, its end is heard later anyway."""
        job = self._job(task)
        try:
            handle = None if job is None else self.launcher.find(job)
            if handle is not None and job is not None:
                self.launcher.cancel(handle, job.folder)
        except (LaunchError, OSError) as error:
            logger.warning("%s cannot be cancelled now", task.skill, extra={"why": str(error)})

    def discard(self, task: Task) -> None:
        """Put a failed attempt's folder aside; what stays is put aside by the next attempt."""
        self._jobs.pop(task.skill, None)
        try:
            self._workshop.discard(task)
        except (FlowrlError, OSError) as error:
            logger.warning("%s: its run folder stays", task.skill, extra={"why": str(error)})

    def heard(self, entry: Entry) -> Sequence[Event]:
        """How the entry's run ended, or that it hangs; nothing while all is well."""
        status = entry.status
        if not isinstance(status, Running) or status.handle is None or entry.expert is None:
            return ()
        task = _task(entry, entry.expert, status)
        try:
            job = self._job(task)
            if job is None:
                return self._without_folder(task)
            outcome = self.launcher.poll(status.handle, job.folder)
        except (LaunchError, OSError) as error:
            logger.warning("%s cannot be looked at now", entry.skill, extra={"why": str(error)})
            return ()
        if outcome is None:
            return self._hung(job, task)
        self._heartbeats.forget(status.run_id)
        frames = outcome.result.frames if isinstance(outcome, Finished) else _frames(job, task)
        return (signals.RunEnded(entry.skill, status.run_id, outcome, frames),)

    def _hung(self, job: Job, task: Task) -> Sequence[Event]:
        progress = RunLayout(job.folder, task.expert).progress
        if self._heartbeats.silent(job.run_id, progress):
            return (signals.RunHung(task.skill, job.run_id),)
        return ()

    def _made(self, task: Task) -> Job:
        if task.run_id is not None:
            try:
                return self._workshop.resume(task)
            except FileRefusedError as error:
                logger.warning("%s starts anew", task.skill, extra={"why": str(error)})
        return self._workshop.prepare(task)

    def _living(self, task: Task) -> Handle | None:
        """The process of a run that is to go on, when it lives or has finished after all."""
        job = self._workshop.reopen(task)
        handle = None if job is None else self.launcher.find(job)
        if job is None or handle is None:
            return None
        outcome: Outcome | None = self.launcher.poll(handle, job.folder)
        if outcome is not None and not isinstance(outcome, Finished):
            return None
        self._jobs[task.skill] = job
        return handle

    def _job(self, task: Task) -> Job | None:
        known = self._jobs.get(task.skill)
        if known is not None and known.run_id == task.run_id:
            return known
        try:
            job = self._workshop.reopen(task)
        except FileRefusedError as error:
            logger.warning("%s: no run folder", task.skill, extra={"why": str(error)})
            return None
        if job is not None:
            self._jobs[task.skill] = job
        return job

    def _merged(self, task: Task) -> Mapping[str, Any]:
        facts = self._workshop.merge(task)
        found = facts.get("run_id", task.run_id)
        if found != task.run_id:
            raise ResultRefusedError(f"{task.skill}: found run {found} instead of {task.run_id}")
        return facts

    def _without_folder(self, task: Task) -> Sequence[Event]:
        """The run's folder is gone: it was merged, or it is lost."""
        assert task.run_id is not None
        try:
            facts = self._merged(task)
        except BusyError as error:
            return (signals.PutOff(task.skill, str(error)),)
        except FlowrlError as error:
            lost = Lost(f"its run folder is gone, and {error}")
            return (signals.RunEnded(task.skill, task.run_id, lost),)
        found = signals.FoundMerged(
            task.skill,
            task.run_id,
            frames=int(facts["frames"]),
            success_rate=float(facts["success_rate"]),
            wall_seconds=float(facts["wall_seconds"]),
        )
        return (found,)


def _fits(task: Task, status: Status, kind: type) -> bool:
    return isinstance(status, kind) and task.run_id == getattr(status, "run_id", None)


def _task(entry: Entry, expert: int, status: Running) -> Task:
    return Task(
        skill=entry.skill,
        expert=expert,
        attempt=status.attempt,
        run_id=status.run_id,
        device=status.device,
    )


def _launched(task: Task, handle: Handle) -> signals.RunLaunched:
    return signals.RunLaunched(task.skill, handle.run_id, handle)


def _frames(job: Job, task: Task) -> int:
    """How far a run without a result got, by its own account."""
    try:
        progress = read_progress(RunLayout(job.folder, task.expert))
    except FileRefusedError:
        return 0
    return progress.frames if progress is not None and progress.run_id == job.run_id else 0


def _said(error: OSError) -> str:
    place = f": {error.filename}" if error.filename else ""
    return f"{error.strerror or error}{place}"
