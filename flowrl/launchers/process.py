"""Processes by pid and start time, and waiting for the end of those that are not our children.

A pid alone does not name a process: it may have been reused. A function that cannot look (because
file descriptors have run out) raises OSError; it never reports that a process is gone.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

from flowrl.launchers.base import Handle

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_RECHECK_SECONDS = 0.05
Key = tuple[int, str]  # pid and start time


@cache
def boot_id() -> str:
    """A name for this boot of the machine."""
    return _BOOT_ID.read_text(encoding="ascii").strip()


def start_time_of(pid: int) -> str:
    """Boot id and start time of a living process; "" when there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""
    facts = text.rpartition(")")[2].split()
    return f"{boot_id()}:{facts[19]}" if facts and facts[0] not in "ZX" else ""


def alive(pid: int, start_time: str) -> bool:
    """Return whether this very process lives; False for a zombie and for an empty start time."""
    return bool(start_time) and start_time_of(pid) == start_time


def send(pid: int, start_time: str, number: signal.Signals) -> bool:
    """Send a signal to this very process; False when it does not live."""
    if pid <= 1 or not alive(pid, start_time):
        return False
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def with_open_file(path: Path) -> list[int]:
    """The other processes of this user that hold `path` open."""
    expected = str(path.resolve())
    return _others(
        lambda folder: any(os.readlink(entry) == expected for entry in (folder / "fd").iterdir())  # noqa: PTH115
    )


def of_script(script: Path, argument: str) -> list[int]:
    """The other processes whose command line ends with a script of this name and this argument.

    It must be the end: a tmux server keeps the command line of the client that started it, and
    that holds the first runner's arguments with more behind them.
    """
    ending = b"/" + os.fsencode(script.name) + b"\0" + os.fsencode(argument) + b"\0"
    return _others(lambda folder: (folder / "cmdline").read_bytes().endswith(ending))


def _others(holds: Callable[[Path], bool]) -> list[int]:
    """The other processes for whose folder in /proc this holds, as far as it can be read."""
    pids = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdigit() and int(folder.name) != os.getpid() and holds(folder):
                pids.append(int(folder.name))
    return pids


class EndWatcher:
    """Sleeps until a runner ends.

    The kernel reports the end through the runner's pidfd, within a millisecond. A descriptor is
    kept from wait to wait, so that waiting for many runners costs nothing. A runner that has none,
    because it has ended or because pidfds are missing or used up, is looked at every 50 ms.
    """

    def __init__(self) -> None:
        self._poll = select.poll()
        self._watched: dict[Key, int] = {}  # → its descriptor

    def wait(self, handles: Iterable[Handle], *, timeout_seconds: float) -> bool:
        """Wait until a runner may have ended (returns True), or for the timeout (returns False)."""
        expected = {(handle.pid, handle.start_time) for handle in handles}
        for key in self._watched.keys() - expected:
            self._drop(key)
        unwatched = [key for key in expected - self._watched.keys() if not self._watch(key)]
        if unwatched:
            timeout_seconds = min(timeout_seconds, _RECHECK_SECONDS)
        ended = {descriptor for descriptor, _ in self._poll.poll(max(0.0, timeout_seconds) * 1000)}
        for key in [key for key, descriptor in self._watched.items() if descriptor in ended]:
            self._drop(key)
        return bool(unwatched or ended)

    def close(self) -> None:
        """Give the descriptors back."""
        for key in list(self._watched):
            self._drop(key)

    def _watch(self, key: Key) -> bool:
        """Open a descriptor that becomes readable when the runner ends; False without one."""
        if len(self._watched) >= _max_watched():
            return False
        try:
            descriptor = os.pidfd_open(key[0])
        except (OSError, AttributeError):  # ended, out of descriptors, or an old kernel
            return False
        with contextlib.suppress(OSError):  # it cannot be looked at now
            if alive(*key):
                self._watched[key] = descriptor
                self._poll.register(descriptor, select.POLLIN)
                return True
        os.close(descriptor)
        return False

    def _drop(self, key: Key) -> None:
        descriptor = self._watched.pop(key)
        self._poll.unregister(descriptor)
        os.close(descriptor)


def _max_watched() -> int:
    """Half of RLIMIT_NOFILE; merges need descriptors too."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
