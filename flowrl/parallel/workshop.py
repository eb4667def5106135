"""What the scheduler asks of those who make run folders and merge results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from flowrl.errors import FileRefusedError
from flowrl.launchers.job import Job
from flowrl.parallel.signals import Task


class Workshop(Protocol):
    """Makes runs and merges them; every call may be repeated after a crash.

    A FlowrlError or an OSError raised here becomes the fate of this one skill; BusyError and a
    full disk mean "try again later".
    """

    def prepare(self, task: Task) -> Job:
        """Make a new run of this attempt; what an earlier one left is put aside."""
        ...

    def resume(self, task: Task) -> Job:
        """Make run `task.run_id` ready to be launched once more, in its own folder.

        Raises:
          FileRefusedError: there is no such run; a new one is prepared instead.
        """
        ...

    def reopen(self, task: Task) -> Job | None:
        """The job of run `task.run_id`, whose folder is left as it is; None without a folder."""
        ...

    def merge(self, task: Task) -> Mapping[str, Any]:
        """Merge the run, or find that it was merged; says its run_id, frames and success_rate."""
        ...

    def archive(self, task: Task) -> object:
        """Tidy up after a merged run, once those that waited for it have been started."""
        ...

    def discard(self, task: Task) -> object:
        """Put the folder of a failed attempt aside."""
        ...


class CallbackWorkshop:
    """A workshop made of two functions; a run is known as long as this process lives."""

    def __init__(
        self, prepare: Callable[[Task], Job], process: Callable[[Task], Mapping[str, Any]]
    ) -> None:
        self._prepare = prepare
        self._process = process
        self._jobs: dict[str, Job] = {}  # by run id

    def prepare(self, task: Task) -> Job:
        """Call `prepare`."""
        job = self._prepare(task)
        self._jobs[job.run_id] = job
        return job

    def resume(self, task: Task) -> Job:
        """The job as it was prepared."""
        job = self.reopen(task)
        if job is None:
            raise FileRefusedError(f"{task.skill}: run {task.run_id} is unknown; prepare it anew")
        return job

    def reopen(self, task: Task) -> Job | None:
        """The job as it was prepared, if it was prepared here."""
        return self._jobs.get(task.run_id or "")

    def merge(self, task: Task) -> Mapping[str, Any]:
        """Call `process`."""
        return self._process(task)

    def archive(self, task: Task) -> None:
        """Forget the run; `process` has tidied up."""
        self._jobs.pop(task.run_id or "", None)

    def discard(self, task: Task) -> None:
        """Forget the run; its folder stays."""
        self._jobs.pop(task.run_id or "", None)
