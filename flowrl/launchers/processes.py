"""Processes by pid and birth, so that a reused pid is never taken for the process it once was.

Whoever cannot look (out of file descriptors) gets an OSError, never the answer "it is gone".
"""

from __future__ import annotations

import contextlib
import os
import signal
from functools import cache
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@cache
def boot_id() -> str:
    """A name for this boot of the machine."""
    return _BOOT_ID.read_text(encoding="ascii").strip()


def birth_of(pid: int) -> str:
    """Boot id and start time of a living process; "" when there is none."""
    facts = _stat(pid)
    return f"{boot_id()}:{facts[19]}" if facts and facts[0] not in "ZX" else ""


def alive(pid: int, birth: str) -> bool:
    """Whether this very process lives; a zombie does not, and neither does one without a birth."""
    return bool(birth) and birth_of(pid) == birth


def other_boot(birth: str) -> bool:
    """Whether the process was started before the machine was last restarted."""
    return bool(birth) and birth.rpartition(":")[0] != boot_id()


def send(pid: int, birth: str, number: signal.Signals) -> bool:
    """Send a signal to this very process; False when it does not live."""
    if pid <= 1 or not alive(pid, birth):
        return False
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def with_open_file(path: Path) -> list[int]:
    """The other processes of this user that hold `path` open."""
    wanted = str(path.resolve())
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            with contextlib.suppress(OSError):
                if any(os.readlink(entry) == wanted for entry in (folder / "fd").iterdir()):  # noqa: PTH115
                    found.append(int(folder.name))
    return found


def with_last_words(*words: str) -> list[int]:
    """The other processes whose command line ends with these words.

    It must end with them: a tmux server keeps the command line of the client that began it, and
    on that stand the words of the first run's runner, with more behind them. A fork that has given
    itself a command line has room left behind it.
    """
    ending = b"".join(b"\0" + os.fsencode(word) for word in words)
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            with contextlib.suppress(OSError):
                if (folder / "cmdline").read_bytes().rstrip(b"\0").endswith(ending):
                    found.append(int(folder.name))
    return found


def _stat(pid: int) -> list[str]:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return []
    return text.rpartition(")")[2].split()
