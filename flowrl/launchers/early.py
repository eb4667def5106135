"""A runner that is started while its run's folder is still being made, and waits for its spec.

It is part of the runner, so it takes nothing but the standard library.
"""
# pathlib alone would double the time to start:
# ruff: noqa: PTH110, PTH123

from __future__ import annotations

import _signal  # pyright: ignore[reportMissingImports]
import os
import time

PAUSE_SECONDS = 0.001
LOOK_SECONDS = 0.1  # between looks at who is to write the spec
WAIT_SECONDS = 60.0  # then it is launched without us: tmux may have begun us far too late


def await_spec(spec: str, launcher: tuple[str, str]) -> bool:
    """Wait until there is a spec; False where nobody will write it, or we are asked to end.

    `launcher` is the pid and the birth of the process that writes it.
    """
    look = time.monotonic() + LOOK_SECONDS
    end = time.monotonic() + WAIT_SECONDS
    while not os.path.exists(spec):
        if _signal.sigpending() - {_signal.SIGCHLD}:
            return False
        if time.monotonic() > look:
            if time.monotonic() > end or not lives(*launcher):
                return os.path.exists(spec)  # it may have been its last act
            look += LOOK_SECONDS
        time.sleep(PAUSE_SECONDS)
    return True


def lives(pid: str, birth: str) -> bool:
    """As `processes.alive`, which would load what takes longer than the wait."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            facts = file.read().rpartition(")")[2].split()
    except OSError:
        return False
    return facts[0] not in "ZX" and facts[19] == birth.rpartition(":")[2]


def leave() -> int:
    """Have our pane ended, which would stay to be read, and answer the exit code.

    We end at once ourselves: as long as this process lives, a launch counts on it.
    """
    try:
        words = ["tmux", "kill-pane", "-t", os.environ["TMUX_PANE"]]
        os.posix_spawnp(words[0], words, os.environ, setsid=True, setsigmask=())
    except (OSError, KeyError):
        return 1
    return 0
