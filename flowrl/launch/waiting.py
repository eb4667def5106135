"""Waiting for the end of processes that are not our children, without polling tmux.

The kernel tells the end of a runner through its pidfd; where pidfds are missing or used up, /proc
is looked at every 50 ms. After each wait the scheduler reads the run folders, so its longest wait
is also the longest time for which anything else could go unnoticed. `tmux list-panes` would add
nothing: a pane that is gone has hung up its runner, which then ends its trainer and writes
`exit.json`; a pane that is there says nothing about the runner that its pidfd does not say first.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Iterable

from flowrl.launch import processes
from flowrl.launch.job import Handle

_RECHECK_SECONDS = 0.05


class EndWatcher:
    """Sleeps until a runner ends; the kernel tells it within a millisecond."""

    def __init__(self) -> None:
        self._told: set[tuple[int, str]] = set()

    def wait(self, handles: Iterable[Handle], *, timeout_seconds: float) -> None:
        """Return when a runner has ended, or after the timeout.

        An end is reported at once, but one time only: what `poll` still calls alive after that
        (an orphan that is being killed) is looked at every 50 ms.
        """
        descriptors: list[int] = []
        try:
            for handle in handles:
                descriptor = self._watch(handle)
                if descriptor is None and self._is_news(handle):
                    return
                if descriptor is None:
                    timeout_seconds = min(timeout_seconds, _RECHECK_SECONDS)
                else:
                    descriptors.append(descriptor)
            self._sleep(descriptors, timeout_seconds)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _watch(self, handle: Handle) -> int | None:
        """A descriptor that becomes readable when the runner ends; None when it cannot be had."""
        try:
            descriptor = os.pidfd_open(handle.pid)
        except (OSError, AttributeError):  # ended, out of descriptors, or an old kernel
            return None
        if _lives(handle):
            return descriptor
        os.close(descriptor)
        return None

    def _is_news(self, handle: Handle) -> bool:
        """Whether an end is told for the first time."""
        key = (handle.pid, handle.birth)
        if _lives(handle) or key in self._told:
            return False
        self._told.add(key)
        return True

    def _sleep(self, descriptors: list[int], timeout_seconds: float) -> None:
        if not descriptors:
            time.sleep(max(0.0, timeout_seconds))
            return
        poll = select.poll()
        for descriptor in descriptors:
            poll.register(descriptor, select.POLLIN)
        poll.poll(max(0.0, timeout_seconds) * 1000)


def _lives(handle: Handle) -> bool:
    try:
        return processes.alive(handle.pid, handle.birth)
    except OSError:
        return True  # it cannot be looked at now
