"""A child process that dies, or meets a failing disk, at its N-th operation on files."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

DONE, FAILED, BROKEN = 0, 3, 4
_CREATES = os.O_CREAT | os.O_WRONLY | os.O_RDWR


class Fault(Enum):
    """What happens at the N-th operation."""

    KILL = "kill -9"
    FULL = "no space from then on"
    EIO = "one fsync fails"


class _Disk:
    def __init__(self, fault: Fault, at: int) -> None:
        self.fault, self.at, self.seen = fault, at, 0

    def audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event in {"os.rename", "os.remove", "os.rmdir"}:
            self.meet(grows=False)
        elif event == "os.mkdir" or (event == "open" and (args[2] or 0) & _CREATES):
            self.meet(grows=True)

    def fsync(self, descriptor: int) -> None:
        if self.fault is Fault.EIO:
            self.seen += 1
            if self.seen - 1 == self.at:
                raise OSError(errno.EIO, "Input/output error (injected)")
        else:
            self.meet(grows=False)
        _FSYNC(descriptor)

    def meet(self, *, grows: bool) -> None:
        if self.fault is Fault.KILL:
            self.seen += 1
            if self.seen - 1 == self.at:
                os.kill(os.getpid(), signal.SIGKILL)
        elif self.fault is Fault.FULL and grows:
            self.seen += 1
            if self.seen - 1 >= self.at:
                raise OSError(errno.ENOSPC, "No space left on device (injected)")


_FSYNC = os.fsync


def meet_fault(work: Callable[[], Any], fault: Fault, at: int) -> bool:
    """Do `work` in a child that meets the fault; False once `work` ended before meeting it."""

    def with_fault() -> None:
        disk = _Disk(fault, at)
        os.fsync = disk.fsync
        sys.addaudithook(disk.audit)
        work()

    code = in_child(with_fault)
    assert code in {DONE, FAILED, -signal.SIGKILL}, code
    return code != DONE


def killed_at(point: str, module: str, *words: object) -> bool:
    """Run `python -m module` with a kill at a named fault point; whether it was killed there."""
    done = subprocess.run(
        [sys.executable, "-m", module, *map(str, words)],
        env={**os.environ, "FLOWRL_FAULT": f"{point}:kill"},
        cwd=Path(__file__).parents[2],
        check=False,
    )
    return done.returncode == -signal.SIGKILL


def in_clean_process(work: Callable[..., None], *args: Any) -> None:
    """Do `work` in a new interpreter, which has no threads and may therefore fork."""
    process = multiprocessing.get_context("spawn").Process(target=work, args=args)
    process.start()
    process.join()
    assert process.exitcode == 0, "see the traceback above"


def in_child(work: Callable[[], Any]) -> int:
    """The exit code of a forked child that does `work`; negative for a signal."""
    child = os.fork()
    if child == 0:
        code = BROKEN
        try:
            work()
            code = DONE
        except OSError as error:
            code = FAILED if "injected" in str(error) else BROKEN
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
