"""The protocol of the backend, which prepares run folders and merges results for the scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

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
