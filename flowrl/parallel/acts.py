"""Carrying out commands: what was ordered is done, and how it went comes back as events.

An error that one skill's files or code can raise (`errors.SKILL_ERRORS`) ends here, as that
skill's event; others go on. Any other exception is a bug and ends the daemon; runs go on.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from flowrl import storage
from flowrl.errors import (
    SKILL_ERRORS,
    BusyError,
    FileRefusedError,
    FlowrlError,
    LaunchError,
    ResultRefusedError,
    classify_io_error,
    format_error,
    is_transient,
)
from flowrl.launchers.job import Finished, Handle, Job, Launcher, Lost, Outcome
from flowrl.parallel import signals
from flowrl.parallel.heartbeat import Watch
from flowrl.parallel.last_words import last_words
from flowrl.parallel.room import Room
from flowrl.parallel.signals import Command, Event, LastWords, Task
from flowrl.parallel.status import Entry, Merging, Preparing, Running, Status
from flowrl.parallel.workshop import Workshop
from flowrl.paths import RunPaths
from flowrl.runs import read_progress

logger = logging.getLogger(__name__)


class Acts:
    """The launcher's and the workshop's side of the scheduler; knows the job of each run."""

    def __init__(self, launcher: Launcher, workshop: Workshop, watch: Watch, room: Room) -> None:
        self.launcher = launcher
        self._workshop = workshop
        self._watch = watch
        self._room = room
        self._jobs: dict[str, Job] = {}  # by skill
        self._asked: set[str] = set()  # runs that have been asked to end
        self._untidied: list[Task] = []  # merged, and not put away yet

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
        except SKILL_ERRORS as error:
            return (self._not_started(task, error, preparing=True),)
        storage.fault_point("scheduler.prepared")
        self._jobs[task.skill] = job
        return (signals.RunPrepared(task.skill, job.run_id),)

    def launch(self, task: Task, *, seek: bool) -> Sequence[Event]:
        """Start the run; with `seek`, only if it was not started before."""
        try:
            job = self._job(task)
            if job is None:
                return self._without_folder(task)
            handle = (self.launcher.find(job) if seek else None) or self.launcher.launch(job)
        except SKILL_ERRORS as error:
            return (self._not_started(task, error, preparing=False),)
        storage.fault_point("scheduler.launched")
        return (_launched(task, handle),)

    def merge(self, task: Task) -> Sequence[Event]:
        """Merge the run."""
        assert task.run_id is not None
        try:
            self._merged(task)
        except SKILL_ERRORS as error:
            self._met(task, error)
            if isinstance(error, BusyError) or is_transient(error):
                return (signals.PutOff(task.skill, format_error(error)),)
            return (signals.MergeRefused(task.skill, task.run_id, format_error(error)),)
        storage.fault_point("scheduler.merged")
        self._jobs.pop(task.skill, None)
        return (signals.MergeDone(task.skill, task.run_id),)

    def tidy(self) -> None:
        """Put merged runs away; one that cannot be now stays for the next beat."""
        left, self._untidied = self._untidied, []
        for task in left:
            try:
                self._workshop.archive(task)
            except SKILL_ERRORS as error:
                self._met(task, error)
                if not isinstance(error, FlowrlError) or isinstance(error, BusyError):
                    self._untidied.append(task)
                logger.warning(
                    "%s: its run folder stays", task.skill, extra={"why": format_error(error)}
                )

    def stop(self, entry: Entry) -> None:
        """Ask a running entry's run to end, once."""
        status = entry.status
        if not isinstance(status, Running) or entry.expert is None:
            return
        if status.run_id not in self._asked:
            self.cancel(_task(entry, entry.expert, status))

    def cancel(self, task: Task) -> None:
        """Ask the run to end; one that cannot be reached now is asked again at the next beat."""
        try:
            job = self._job(task)
            handle = None if job is None else self.launcher.find(job)
            if handle is not None and job is not None:
                self.launcher.cancel(handle, job.folder)
                self._asked.add(handle.run_id)
        except (FlowrlError, OSError) as error:
            logger.warning(
                "%s cannot be cancelled now", task.skill, extra={"why": format_error(error)}
            )

    def discard(self, task: Task) -> None:
        """Put a failed attempt's folder aside; what stays is put aside by the next attempt."""
        self._jobs.pop(task.skill, None)
        try:
            self._workshop.discard(task)
        except SKILL_ERRORS as error:
            logger.warning(
                "%s: its run folder stays", task.skill, extra={"why": format_error(error)}
            )

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
        except SKILL_ERRORS as error:
            logger.warning(
                "%s cannot be looked at now", entry.skill, extra={"why": format_error(error)}
            )
            return ()
        if outcome is None:
            return self._living_too_long(entry, job, status)
        self._forget(status.run_id)
        if isinstance(outcome, Finished):
            ended = signals.RunEnded(entry.skill, status.run_id, outcome, outcome.result.frames)
        else:
            frames, words = _frames(job, task), _words(job, task)
            ended = signals.RunEnded(entry.skill, status.run_id, outcome, frames, words)
        return (ended,)

    def left_seconds(self, handle: Handle) -> float:
        """How much longer this run may take."""
        return self._watch.left_seconds(handle)

    def _living_too_long(self, entry: Entry, job: Job, status: Running) -> Sequence[Event]:
        """What follows from a run's silence or age; a request to end is made until it arrives."""
        if status.asked:
            self.stop(entry)
            return ()
        if status.handle is not None and self._watch.left_seconds(status.handle) < 0:
            return (signals.RunOverdue(entry.skill, job.run_id),)
        progress = RunPaths(job.folder, entry.expert or 0).progress
        if self._watch.silent(job.run_id, progress):
            if self._room.free:
                return (signals.RunHung(entry.skill, job.run_id),)
            self._watch.excuse(job.run_id)  # it cannot write its progress either
        return ()

    def _forget(self, run_id: str) -> None:
        self._watch.forget(run_id)
        self._asked.discard(run_id)

    def _met(self, task: Task, error: BaseException) -> None:
        """A full disk pauses all; what nobody foresaw is shown with its traceback."""
        self._room.met(error)
        if not isinstance(error, FlowrlError | OSError):
            logger.error("%s: %s", task.skill, format_error(error), exc_info=error)

    def _not_started(self, task: Task, error: BaseException, *, preparing: bool) -> Event:
        """When to try again, if it makes sense to."""
        self._met(task, error)
        if isinstance(error, BusyError) or classify_io_error(error) == "disk":
            return signals.PutOff(task.skill, format_error(error))
        if preparing and not isinstance(error, LaunchError | OSError) and not is_transient(error):
            return signals.PrepareRefused(task.skill, format_error(error))
        return signals.LaunchRefused(task.skill, format_error(error))

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
        self._untidied.append(task)
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


def _words(job: Job, task: Task) -> LastWords:
    return last_words(RunPaths(job.folder, task.expert).training_log)


def _frames(job: Job, task: Task) -> int:
    """How far a run without a result got, by its own account."""
    try:
        progress = read_progress(RunPaths(job.folder, task.expert))
    except FileRefusedError:
        return 0
    return progress.frames if progress is not None and progress.run_id == job.run_id else 0
