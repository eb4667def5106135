"""Facts about the arrays of an expert's checkpoint, read by a child process.

The files come from a trainer, so a child (`array_reader.py`) reads them: files that make it crash,
hang or take all memory harm no other process, and the merging process loads no array library. Each
child serves one check. Its libraries take 0.3 s to load, so it can be started ahead of time.
"""

from __future__ import annotations

import errno
import json
import math
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from flowrl.errors import BusyError, ExpertCorruptError
from flowrl.runs import Shapes

READER = Path(__file__).with_name("array_reader.py")
_SECONDS = 120.0
_MEMORY_BYTES = 8 * 2**30  # of address space: the libraries alone take more than a gigabyte
_ENDED = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGALRM)
_ENDED_FROM_OUTSIDE = tuple(-number for number in _ENDED)  # or by its own alarm


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayReport:
    """The arrays of one folder, as they were read."""

    content: str = ""  # as `checkpoint.array_digest` computes it; "" if no array was loaded
    differences: tuple[tuple[str, str, str], ...] = ()  # leaf, what is expected, what was found
    unreadable: str = ""  # the reason, if the folder could not be read


STARTED: list[subprocess.Popen[bytes]] = []


def start_reader() -> None:
    """Start the child of the next check now; if that fails, the check starts it."""
    with suppress(OSError):
        if not STARTED:
            STARTED.append(_popen())


def read_arrays(folders: Sequence[Path], expected: Shapes) -> tuple[ArrayReport, ...]:
    """Read the arrays in each folder; only leaves of the `expected` shapes, by path, are loaded.

    ExpertCorruptError: the files crash their reader. BusyError: it was ended, took too long, failed
    before it looked at a file, or the machine was short of threads or memory.
    """
    if not folders:
        return ()
    largest = max((4 * math.prod(shape) for shape in expected.values()), default=0)
    order = {
        "folders": [str(folder.absolute()) for folder in folders],
        "expected": expected,
        "memory_bytes": _MEMORY_BYTES + 4 * largest,
        "seconds": math.ceil(_SECONDS),
    }
    names = ", ".join(str(folder) for folder in folders)
    with _reader() as child:
        try:
            answer, errors = child.communicate(json.dumps(order).encode(), timeout=_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise BusyError(
                f"the arrays in {names} could not be read within {_SECONDS:g} s; try again later"
            ) from error
        finally:
            child.kill()  # does nothing to a child that has ended
    lines = errors.decode(errors="replace").strip().splitlines()
    said = lines[-1][:200] if lines else "no error message"
    how = f"the reader ended with {child.returncode}: {said}"
    ready, _, found = answer.partition(b"\n")
    short = _is_limited(order["memory_bytes"]) or os.strerror(errno.EAGAIN) in said
    if not ready or child.returncode in _ENDED_FROM_OUTSIDE or (child.returncode and short):
        raise BusyError(f"the arrays in {names} cannot be read now ({how}); try again later")
    try:
        reports = json.loads(b"" if child.returncode else found)
    except ValueError as error:
        raise ExpertCorruptError(
            f"the arrays in {names} cannot be read ({how}); train again"
        ) from error
    return tuple(
        ArrayReport(**{**item, "differences": tuple(map(tuple, item["differences"]))})
        for item in reports
    )


def _is_limited(memory_bytes: int) -> bool:
    """Return whether a hard limit gives the reader less memory than any files may take."""
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    return resource.RLIM_INFINITY != most < memory_bytes


def _reader() -> subprocess.Popen[bytes]:
    """The child that was started ahead, if it still waits for an order, or a new one."""
    while STARTED:
        child = STARTED.pop()
        if child.poll() is None:  # nor is it the child of a forked parent
            return child
    return _popen()


def _popen() -> subprocess.Popen[bytes]:
    """A child that inherits no lock and no key typed in a terminal, and ends with its input."""
    return subprocess.Popen(
        [sys.executable, "-P", "-B", str(READER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )
