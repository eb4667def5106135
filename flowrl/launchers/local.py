"""A launcher, a leaf: plain detached processes, for machines without tmux, comparisons and tests.

They outlive the daemon as tmux sessions do, in a session of their own, but nobody can attach.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from flowrl.errors import LaunchError
from flowrl.launchers import process, run_status
from flowrl.launchers.base import Handle, Job, Outcome
from flowrl.launchers.launcher import GRACE_SECONDS, Launcher


class LocalLauncher(Launcher):
    """The Launcher without tmux."""

    def __init__(self, *, grace_seconds: float = GRACE_SECONDS) -> None:
        super().__init__(grace_seconds=grace_seconds)
        self._children: list[subprocess.Popen] = []

    def poll(self, handle: Handle, folder: Path) -> Outcome | None:
        """Return the outcome of the job, or None while it lives."""
        self._reap()
        return super().poll(handle, folder)

    def close(self) -> None:
        """Release what has ended; jobs go on."""
        self._reap()
        for child in self._children:
            child.returncode = 0  # it goes on without us: Popen must not warn about it
        self._children.clear()

    def _start(self, job: Job) -> Handle:
        """Start the runner with its output piped to the log's writer."""
        try:
            log = self._begin(job, run_status.log_words(job), stdin=subprocess.PIPE)
            assert log.stdin is not None
            with log.stdin:
                pid = self._begin(job, run_status.runner_words(job), stdout=log.stdin).pid
        except OSError as error:
            raise LaunchError(f"{job.name} cannot be started: {error}") from error
        start_time = process.start_time_of(pid)
        return Handle(run_id=job.run_id, session=job.name, pid=pid, start_time=start_time)

    def _begin(self, job: Job, words: Sequence[str], **streams) -> subprocess.Popen:
        child = subprocess.Popen(
            words,
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
