"""What the runner knows of processes: limits, reaching a confined trainer, how one has died.

It is part of the runner, so it takes nothing but the standard library.
"""
# pathlib alone would double the time to start:
# ruff: noqa: PTH123, PTH208

from __future__ import annotations

# The module signal puts names around this one, which take long to make.
import _signal  # pyright: ignore[reportMissingImports]
import os
import resource

FILE_BYTES = 2**34


def limit_files() -> None:
    """Let no file grow without end, be it sparse: somebody will read or copy it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    least = min((limit for limit in (soft, hard) if limit >= 0), default=FILE_BYTES)
    resource.setrlimit(resource.RLIMIT_FSIZE, (min(least, FILE_BYTES), hard))


def tell(trainer: int, number: int, *, confined: bool) -> None:
    """Send a signal to the trainer itself.

    A confined one is the grandchild of the bubblewrap that we have started, which would die of
    the signal and take the trainer along. Before there is a grandchild, nothing is lost by that.
    """
    pids = children_of(children_of([trainer])) if confined else []
    for pid in pids or [trainer]:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def children_of(parents: list[int]) -> list[int]:
    """The processes whose parent is one of these."""
    found: list[int] = []
    for name in os.listdir("/proc") if parents else ():
        try:
            with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                if int(file.read().rpartition(")")[2].split()[1]) in parents:
                    found.append(int(name))
        except (OSError, ValueError, IndexError):
            continue
    return found


def signal_in(status: int, *, confined: bool) -> int | None:
    """The signal that a trainer died of; bubblewrap tells it as shells do, by 128 and its number.

    130 stays an exit code: it is our own for Ctrl-C, and means the same.
    """
    if os.WIFSIGNALED(status):
        return os.WTERMSIG(status)
    number = os.WEXITSTATUS(status) - 128
    if confined and number != _signal.SIGINT and 0 < number < _signal.NSIG:
        return number
    return None


def oom_kills() -> int:
    """How often the kernel killed for lack of memory: in our cgroup, else on the machine."""
    for path in (*memory_event_files(), "/proc/vmstat"):
        try:
            with open(path, encoding="ascii") as file:
                counts = dict(line.split()[:2] for line in file)
            return int(counts["oom_kill"])
        except (OSError, KeyError, ValueError):
            continue
    return 0


def memory_event_files() -> list[str]:
    """Where cgroup version 2, or 1, counts the kills of our own group."""
    try:
        with open("/proc/self/cgroup", encoding="utf-8") as file:
            groups = [line.rstrip("\n").split(":", 2) for line in file]
    except OSError:
        return []
    files = [f"/sys/fs/cgroup{group[2]}/memory.events" for group in groups if group[0] == "0"]
    old = [group[2] for group in groups if group[1] == "memory"]
    return files + [f"/sys/fs/cgroup/memory{path}/memory.oom_control" for path in old]
