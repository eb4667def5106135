"""Hearing that the trainer should stop; loads no JAX, so that it can listen from the start."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from flowrl.errors import EXIT_RESUMABLE

EXIT_INTERRUPTED = 130  # as shells report Ctrl-C
_HEARD = (signal.SIGTERM, signal.SIGINT)


class StopWish:
    """Remembers SIGTERM or SIGINT until the loop asks between two updates.

    A second Ctrl-C does not wait: it raises KeyboardInterrupt where the program stands.
    """

    def __init__(self) -> None:
        self._signal: int | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take the signals over for the length of the block, in a program's main thread."""
        before = {number: signal.signal(number, self._hear) for number in _HEARD}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @property
    def heard(self) -> bool:
        """Whether somebody wants the trainer to stop."""
        return self._signal is not None

    @property
    def exit_code(self) -> int:
        """What the program should end with once its state is saved."""
        return EXIT_INTERRUPTED if self._signal == signal.SIGINT else EXIT_RESUMABLE

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._signal == signal.SIGINT:
            raise KeyboardInterrupt
        self._signal = number
