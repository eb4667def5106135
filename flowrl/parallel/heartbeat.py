"""Which runs have shown no progress for too long, by a clock that cannot jump."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

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
