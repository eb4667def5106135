"""Waiting for a condition, within limits that grow on a slow or busy machine.

No test asserts how long something takes, only that it does not wait in vain. `tests/counting.py`
counts work.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

_START_SECONDS = 0.02  # a bare Python on the machine that the limits were written on
_STARTS = 3
AT_ONCE = 0.002  # seconds between two looks, where a signal must hit an instant
_SELDOM = 0.03


def _measured_pace() -> float:
    """How many times as long as there a process takes to start here and now; at least 1."""
    began = time.monotonic()
    for _ in range(_STARTS):
        subprocess.run([sys.executable, "-I", "-S", "-c", ""], check=True)
    return max(1.0, (time.monotonic() - began) / _STARTS / _START_SECONDS)


# Processes that tests start are told what their test has measured, on the machine as busy as it is.
_TOLD = f"SUITE_PACE_{os.environ.get('PYTEST_XDIST_WORKER', '')}"
PACE = float(os.environ.get(_TOLD) or _measured_pace())
os.environ[_TOLD] = f"{PACE}"


def limit(seconds: float) -> float:
    """A limit of so many seconds as it is to be on this machine."""
    return seconds * PACE


def until(
    condition: Callable[[], Any],
    *,
    seconds: float = 60.0,
    what: str = "it",
    every: float | None = None,
) -> Any:
    """Wait until the condition is true; returns its value.

    It is asked every so many seconds; by default `AT_ONCE`, and less often the longer it takes.
    """
    deadline, pause = time.monotonic() + limit(seconds), every or AT_ONCE
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what} did not come about"
        time.sleep(pause)
        pause = every or min(1.3 * pause, _SELDOM)
    return value
