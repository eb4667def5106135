"""Which runs have shown no progress, or lived, for too long, by clocks that cannot jump."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path

from flowrl.launchers.job import Handle
from flowrl.launchers.processes import boot_id

Sign = tuple[int, int]  # modification time and size of progress.json


class Heartbeats:
    """Remembers when each run's progress.json last changed."""

    def __init__(
        self, limit_seconds: float, *, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._limit_seconds = limit_seconds
        self._monotonic = monotonic
        self._seen: dict[str, tuple[Sign, float]] = {}  # by run id

    def silent(self, run_id: str, progress: Path) -> bool:
        """Whether the run has been silent for longer than the limit; look often."""
        now = self._monotonic()
        sign = _sign(progress)
        known = self._seen.get(run_id)
        if known is None or known[0] != sign:
            self._seen[run_id] = (sign, now)
            return False
        return now - known[1] > self._limit_seconds

    def forget(self, run_id: str) -> None:
        """The run has ended."""
        self._seen.pop(run_id, None)


def _sign(path: Path) -> Sign:
    try:
        facts = path.stat()
    except OSError:
        return (0, 0)
    return (facts.st_mtime_ns, facts.st_size)


class Ages:
    """How long each run's process has been there, by clocks that nobody sets."""

    def __init__(
        self, limit_seconds: float | None, *, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._limit_seconds = limit_seconds
        self._monotonic = monotonic
        self._began: dict[tuple[str, str], float] = {}  # by run id and birth

    def left_seconds(self, handle: Handle) -> float:
        """How much longer the run may take; below 0 when it is overdue."""
        if self._limit_seconds is None:
            return math.inf
        key = (handle.run_id, handle.birth)
        now = self._monotonic()
        if key not in self._began:
            self._began[key] = now - age_seconds(handle.birth)
        return self._began[key] + self._limit_seconds - now

    def forget(self, run_id: str) -> None:
        """The run has ended."""
        for key in [key for key in self._began if key[0] == run_id]:
            del self._began[key]


def age_seconds(birth: str) -> float:
    """How long ago a process was born, by the kernel's own clock; 0 when it does not say."""
    boot, _, ticks = birth.rpartition(":")
    if not ticks.isdigit() or boot != boot_id():
        return 0.0
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK"))


class Watch:
    """Both limits of one scheduler's runs."""

    def __init__(self, *, silent_seconds: float, run_seconds: float | None) -> None:
        self._heartbeats = Heartbeats(silent_seconds)
        self._ages = Ages(run_seconds)

    def silent(self, run_id: str, progress: Path) -> bool:
        """Whether the run has shown no progress for too long."""
        return self._heartbeats.silent(run_id, progress)

    def left_seconds(self, handle: Handle) -> float:
        """How much longer the run may take."""
        return self._ages.left_seconds(handle)

    def excuse(self, run_id: str) -> None:
        """Count the run's silence anew."""
        self._heartbeats.forget(run_id)

    def forget(self, run_id: str) -> None:
        """The run has ended."""
        self._heartbeats.forget(run_id)
        self._ages.forget(run_id)
