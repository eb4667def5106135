"""Child processes, some of which end with this one; alone, because several rooms use it."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Event

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
_LEAST = "19"  # the nice value of a session that yields to all others
_POLL_SECONDS, _ENDING_SECONDS = 0.5, 5.0
# Beside threads nothing of ours may run between fork and exec: the child ties itself to its parent.
_PROGRAM = """import sys
from flowrl.launchers.child import die_with_parent
die_with_parent(int(sys.argv[1]))
from flowrl import cli
sys.exit(cli.main(sys.argv[2:]))"""
Child = subprocess.Popen[bytes]


def start(words: Sequence[str], env: Mapping[str, str] | None = None) -> Child:
    """Start a process that inherits the open files, and that the kernel kills with this one.

    Call it while this process has a single thread.
    """
    own = partial(die_with_parent, os.getpid())
    return subprocess.Popen(words, env=env, close_fds=False, preexec_fn=own)  # noqa: PLW1509


def end(children: Iterable[Child], *, grace_seconds: float = 0.0) -> None:
    """Wait for each child so long, then kill it."""
    for child in children:
        with suppress(subprocess.TimeoutExpired):
            child.wait(grace_seconds)
        child.kill()
        child.wait()


def run(
    words: Sequence[str], *, env: Mapping[str, str], seconds: float, text: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run a program on this text; raises OSError, or TimeoutExpired once it has taken so long."""
    return subprocess.run(
        words,
        check=False,
        env=env,
        input=text,
        capture_output=True,
        encoding="utf-8",
        errors="backslashreplace",
        timeout=seconds,
    )


def reason(done: subprocess.CompletedProcess[str]) -> str:
    """Return the last line of what a program that failed has said, or its exit code."""
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return (lines or [f"exit code {done.returncode}"])[-1]


def flowrl_words(*words: str) -> tuple[str, ...]:
    """Return what starts a command of flowrl that the kernel kills with this process."""
    return sys.executable, "-c", _PROGRAM, str(os.getpid()), *words


def run_aside(
    words: Sequence[str], *, seconds: float, leaving: Event, when_idle: bool = False
) -> str:
    """Run a command of flowrl from a thread; return how it failed, "" if it did not.

    It is ended once it has taken so long, or `leaving` is set. OSError: it cannot be started.
    """
    pipe, null, said = subprocess.PIPE, subprocess.DEVNULL, None
    until = time.monotonic() + seconds
    child = subprocess.Popen(words, stdin=null, stdout=null, stderr=pipe, start_new_session=True)
    if when_idle:
        run_when_idle(child.pid)
    while said is None and time.monotonic() < until and not leaving.is_set():
        with suppress(subprocess.TimeoutExpired):
            _, said = child.communicate(timeout=_POLL_SECONDS)
    if said is None:
        _end_session(child)
        return f"ended after {seconds:g} seconds"
    last = said.decode(errors="replace").strip().rpartition("\n")[2]
    return f"exit code {child.returncode}: {last}" if child.returncode else ""


def _end_session(child: Child) -> None:
    """End a program that leads a session: by SIGTERM it ends what it has confined itself."""
    child.terminate()
    try:
        child.communicate(timeout=_ENDING_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()


def run_when_idle(pid: int) -> None:
    """Let a process, and all that it starts in its session, run only while a processor is idle.

    It must lead a session of its own. The kernel shares processors out between sessions first
    (autogroups), so that neither nice nor SCHED_IDLE alone says anything to those of trainers.
    """
    os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))
    weight = Path(f"/proc/{pid}/autogroup")
    with suppress(OSError):  # a kernel without autogroups
        weight.write_text(_LEAST, encoding="ascii")


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends; runs between fork and exec."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        os._exit(128 + signal.SIGKILL)
