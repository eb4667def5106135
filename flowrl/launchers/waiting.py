"""Waiting for the end of processes that are not our children, without polling tmux.

The kernel tells the end of a runner through its pidfd; where pidfds are missing or used up, /proc
is looked at every 50 ms. After each wait the scheduler reads the run folders, so its longest wait
is also the longest time for which anything else could go unnoticed. `tmux list-panes` would add
nothing: a pane that is gone has hung up its runner, which then ends its trainer and writes
`exit.json`; a pane that is there says nothing about the runner that its pidfd does not say first.
"""

from __future__ import annotations

import os
import resource
import select
from collections.abc import Iterable

from flowrl.launchers import processes
from flowrl.launchers.job import Handle

_RECHECK_SECONDS = 0.05
Key = tuple[int, str]  # pid and birth


class EndWatcher:
    """Sleeps until a runner ends; the kernel tells it within a millisecond.

    The descriptor of a runner is kept from wait to wait, so that waiting for many costs nothing.
    """

    def __init__(self) -> None:
        self._poll = select.poll()
        self._watched: dict[Key, int] = {}  # → its descriptor
        self._told: set[Key] = set()

    def wait(self, handles: Iterable[Handle], *, timeout_seconds: float) -> None:
        """Return when a runner has ended, or after the timeout.

        An end is reported at once, but one time only: what `poll` still calls alive after that
        (an orphan that is being killed) is looked at every 50 ms.
        """
        wanted = {(handle.pid, handle.birth): handle for handle in handles}
        self._told &= wanted.keys()
        for key in self._watched.keys() - wanted.keys():
            self._drop(key)
        for key in wanted.keys() - self._watched.keys():
            if self._watch(key):
                continue
            if self._is_news(key):
                return
            timeout_seconds = min(timeout_seconds, _RECHECK_SECONDS)
        ended = {descriptor for descriptor, _ in self._poll.poll(max(0.0, timeout_seconds) * 1000)}
        for key in [key for key, descriptor in self._watched.items() if descriptor in ended]:
            self._told.add(key)
            self._drop(key)

    def sees_alive(self, handle: Handle) -> bool:
        """Whether the kernel says that this runner lives; False where it was not asked before.

        That costs next to nothing, while whoever reads what a run has written down opens files.
        """
        descriptor = self._watched.get((handle.pid, handle.birth))
        if descriptor is None:
            return False
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return not poll.poll(0)

    def close(self) -> None:
        """Give the descriptors back."""
        for key in list(self._watched):
            self._drop(key)

    def _watch(self, key: Key) -> bool:
        """Have a descriptor that becomes readable when the runner ends, if it can be had."""
        if key in self._told or len(self._watched) >= _most_watched():
            return False
        try:
            descriptor = os.pidfd_open(key[0])
        except (OSError, AttributeError):  # ended, out of descriptors, or an old kernel
            return False
        if not _lives(key):
            os.close(descriptor)
            return False
        self._watched[key] = descriptor
        self._poll.register(descriptor, select.POLLIN)
        return True

    def _drop(self, key: Key) -> None:
        descriptor = self._watched.pop(key)
        self._poll.unregister(descriptor)
        os.close(descriptor)

    def _is_news(self, key: Key) -> bool:
        """Whether an end is told for the first time."""
        if key in self._told or _lives(key):
            return False
        self._told.add(key)
        return True


def _most_watched() -> int:
    """So many descriptors leave enough for merges."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2


def _lives(key: Key) -> bool:
    try:
        return processes.alive(*key)
    except OSError:
        return True  # it cannot be looked at now
