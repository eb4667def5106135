"""Processes by pid and start time, and waiting for the end of those that are not our children.

A pid alone does not name a process: it may have been reused. A function that cannot look (because
file descriptors have run out) raises OSError; it never reports that a process is gone.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

from flowrl.launchers.base import Handle

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_RECHECK_SECONDS = 0.05


@cache
def boot_id() -> str:
    """A name for this boot of the machine."""
    return _BOOT_ID.read_text(encoding="ascii").strip()


@cache
def namespace() -> str:
    """The name of the namespace in which process ids hold here."""
    return os.readlink("/proc/self/ns/pid")  # noqa: PTH115 — it is no path


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


def of_script(script: Path, *arguments: str) -> list[int]:
    """The other processes whose command line ends with a script of this name and these arguments.

    It must be the end: a tmux server keeps the command line of the client that started it, and
    that holds the first runner's arguments with more behind them.
    """
    ending = b"/" + b"".join(os.fsencode(word) + b"\0" for word in (script.name, *arguments))
    return _others(lambda folder: (folder / "cmdline").read_bytes().endswith(ending))


def _others(holds: Callable[[Path], bool]) -> list[int]:
    """The other processes for whose folder in /proc this holds, as far as it can be read."""
    pids = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdigit() and int(folder.name) != os.getpid() and holds(folder):
                pids.append(int(folder.name))
    return pids


def wait_for_end(handles: Iterable[Handle], *, timeout_seconds: float) -> bool:
    """Wait until a runner may have ended (returns True), or for the timeout (returns False).

    The kernel reports the end through the runner's pidfd, within a millisecond. A runner that has
    none, because it has ended or because pidfds are missing or used up, is looked at after 50 ms.
    """
    poll, unwatched = select.poll(), False
    with contextlib.ExitStack() as opened:
        for pid, start_time in {(handle.pid, handle.start_time) for handle in handles}:
            try:
                descriptor = os.pidfd_open(pid)
                opened.callback(os.close, descriptor)
                lives = alive(pid, start_time)
            except (OSError, AttributeError):  # ended, out of descriptors, or an old kernel
                lives = False
            if lives:
                poll.register(descriptor, select.POLLIN)
            else:
                unwatched, timeout_seconds = True, min(timeout_seconds, _RECHECK_SECONDS)
        ended = poll.poll(max(0.0, timeout_seconds) * 1000)
    return bool(unwatched or ended)
