"""The protocol of the backend, which prepares run folders and merges results for the scheduler."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from flowrl.errors import FileRefusedError
from flowrl.launchers.base import Job
from flowrl.parallel.events import RunRequest


class Backend(Protocol):
    """Prepares runs and merges them; every call may be repeated after a crash.

    A FlowrlError or an OSError raised here concerns this one skill; BusyError and a full disk
    mean "try again later".
    """

    def prepare(self, request: RunRequest, /) -> Job:
        """Prepare a new run of this attempt; what an earlier one left is moved away."""
        ...

    def resume(self, request: RunRequest, /) -> Job:
        """Make run `request.run_id` ready to be launched once more, in its own folder.

        Raises:
          FileRefusedError: there is no such run; a new one is prepared instead.
        """
        ...

    def reopen(self, request: RunRequest, /) -> Job | None:
        """Return the job of run `request.run_id`, unchanged; None without a folder."""
        ...

    def merge(self, request: RunRequest, /) -> Mapping[str, Any]:
        """Merge the run, or find that it was merged; return run_id, frames and success_rate."""
        ...

    def archive(self, request: RunRequest, /) -> object:
        """Archive a merged run, once the runs that waited for it have been started."""
        ...

    def discard(self, request: RunRequest, /) -> object:
        """Move the folder of a failed attempt away."""
        ...


class CallbackBackend:
    """A backend made of two functions; a run is known as long as this process lives."""

    def __init__(
        self,
        prepare: Callable[[RunRequest], Job],
        process: Callable[[RunRequest], Mapping[str, Any]],
    ) -> None:
        self._prepare = prepare
        self._process = process
        self._jobs: dict[str, Job] = {}  # by run id

    def prepare(self, request: RunRequest, /) -> Job:
        """Call `prepare`."""
        job = self._prepare(request)
        self._jobs[job.run_id] = job
        return job

    def resume(self, request: RunRequest, /) -> Job:
        """Return the job as it was prepared."""
        job = self.reopen(request)
        if job is None:
            raise FileRefusedError(
                f"{request.skill}: run {request.run_id} is unknown; prepare it anew"
            )
        return job

    def reopen(self, request: RunRequest, /) -> Job | None:
        """Return the job as it was prepared, if it was prepared here."""
        return self._jobs.get(request.run_id or "")

    def merge(self, request: RunRequest, /) -> Mapping[str, Any]:
        """Call `process`."""
        return self._process(request)

    def archive(self, request: RunRequest, /) -> None:
        """Forget the run; `process` has archived it."""
        self._jobs.pop(request.run_id or "", None)

    def discard(self, request: RunRequest, /) -> None:
        """Forget the run; its folder stays."""
        self._jobs.pop(request.run_id or "", None)
