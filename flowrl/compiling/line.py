"""A line: one after another, in the order in which they got in line.

Tracing is Python, so threads take turns at it, and it matters whose turn comes first: what takes
longest to compile should be traced first. A plain lock would give the turn to anybody.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Line:
    """Those who wait for their turn, by number; a lower one is served before a higher."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._numbers = itertools.count()
        self._waiting: set[int] = set()
        self._served = False

    def join(self) -> int:
        """Get in line, at its end; all others behind wait until this number is served or leaves."""
        with self._change:
            number = next(self._numbers)
            self._waiting.add(number)
            return number

    def leave(self, number: int) -> None:
        """Give up the place in line; without effect when it was given up before."""
        with self._change:
            self._waiting.discard(number)
            self._change.notify_all()

    @contextmanager
    def turn(self, number: int) -> Iterator[None]:
        """Wait until all before have been served, and be served for the length of the block.

        Who has left the line gets in again, at its end.
        """
        with self._change:
            number = number if number in self._waiting else self.join()
            self._change.wait_for(lambda: not self._served and min(self._waiting) == number)
            self._served = True
        try:
            yield
        finally:
            self._served = False
            self.leave(number)
