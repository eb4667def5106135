"""The preloaded shim, from Python: compile it, start a process with it, meet a fault in a child.

A process that was started `with_shim` forks once per fault; only the child is armed. The fault
hits the child's N-th operation that changes something below the watched folder.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("shim.c")
ROOT = Path(__file__).parents[2]
_INJECTED = (5, 28)  # EIO, ENOSPC
_CLOSES_WITHIN = 10.0  # seconds


class Mode(Enum):
    """What happens at the N-th operation; the values are those of shim.c."""

    COUNT = 0
    KILL_BEFORE = 1
    KILL_AFTER = 2
    TORN = 3
    EIO_ONCE = 4
    FULL = 5
    SHORT = 6
    CUT_BEFORE = 7
    CUT_AFTER = 8
    CUT_BEFORE_COMMIT = 9
    CUT_AFTER_COMMIT = 10


FIVE = (Mode.KILL_BEFORE, Mode.KILL_AFTER, Mode.TORN, Mode.EIO_ONCE, Mode.FULL)
KILLS = (Mode.KILL_BEFORE, Mode.KILL_AFTER, Mode.TORN)


class End(Enum):
    """How the child ended."""

    DONE = 0
    FAILED = 3
    BROKEN = 4
    LEAKED = 6
    KILLED = -signal.SIGKILL


class _Report(ctypes.Structure):
    _fields_ = [("seen", ctypes.c_long), ("met", ctypes.c_long), ("what", ctypes.c_char * 512)]


@dataclass(frozen=True, slots=True)
class Meeting:
    """What came of one child: whether it met its fault, where, and how it ended."""

    met: bool
    where: str
    end: End
    seen: int


def compiler() -> str | None:
    """A C compiler's path, None where there is none."""
    return shutil.which("gcc") or shutil.which("cc")


def compiled(folder: Path) -> Path:
    """The shim as a library in `folder`."""
    found = compiler()
    assert found, "no C compiler"
    library = folder / "shim.so"
    words = ["-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", str(library), str(SOURCE), "-ldl"]
    subprocess.run([found, *words], check=True)
    return library


def with_shim(library: Path, module: str, *words: str, within: Sequence[str] = ()) -> int:
    """Run `python -m module` with the shim preloaded; answers its exit code.

    `within` are the words of another program that starts it.
    """
    environment = {**os.environ, "LD_PRELOAD": str(library), "PYTHONPATH": str(ROOT)}
    argv = [*within, sys.executable, "-m", module, *words]
    return subprocess.run(argv, env=environment, cwd=ROOT, check=False).returncode


def _open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def _as_many_open(before: int) -> bool:
    """Whether no more and no fewer files are open; a library's threads may close theirs late."""
    end = time.monotonic() + _CLOSES_WITHIN
    while _open_files() != before:
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


class Shim:
    """The shim that was preloaded into this process."""

    def __init__(self, *, real_sync: bool = False, mount: int = -1) -> None:
        self._library = ctypes.CDLL(None)
        self._library.shim_arm.argtypes = [
            ctypes.c_char_p,
            ctypes.c_int,
            ctypes.c_long,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_void_p,
        ]
        self._real_sync, self.mount = real_sync, mount
        self._page = mmap.mmap(-1, mmap.PAGESIZE)  # shared with every child
        self._report = _Report.from_buffer(self._page)

    def meet(
        self, watched: Path, mode: Mode, at: int, work: Callable[[], Any], *, tidy: bool = True
    ) -> Meeting:
        """Do `work` in a forked child that meets the fault at its operation `at`.

        Unless it may be untidy, to leave a file open is to leak it.
        """
        self._report.met = 0
        child = os.fork()
        if child == 0:
            code = End.BROKEN.value
            try:
                code = self._work(watched, mode, at, work, tidy=tidy).value
            except BaseException:  # noqa: BLE001 the child ends here, whatever it is
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        report = self._report
        return Meeting(bool(report.met), report.what.decode(), End(code), report.seen)

    def die(self) -> None:
        """In a child: end as its mode says, now that its work is done."""
        self._library.shim_die()

    def _work(
        self, watched: Path, mode: Mode, at: int, work: Callable[[], Any], *, tidy: bool
    ) -> End:
        before = _open_files()
        self._arm(watched, mode, at)
        try:
            work()
            end = End.DONE
        except OSError as error:
            if error.errno not in _INJECTED:
                raise
            end = End.FAILED
        self._library.shim_disarm()
        return end if not tidy or _as_many_open(before) else End.LEAKED

    def _arm(self, watched: Path, mode: Mode, at: int) -> None:
        self._library.shim_arm(
            os.fsencode(watched),
            mode.value,
            at,
            self._real_sync,
            self.mount,
            ctypes.addressof(self._report),
        )
