"""Train one run: `python -m flowrl.ppo_flow --module_path RUN/2.py`.

Reads the generated module, run.json and the seed experts beside it; leaves the final experts
and, last of all, result.json. Ends with 0 when the run is whole, with 85 (SIGTERM) or 130
(Ctrl-C) when it was asked to stop and the same command goes on with it, with 2 for a wrong
command line, and with 1 for anything else, the reason in one line.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

import psutil

from flowrl import console
from flowrl.config import TrainConfig, parse
from flowrl.errors import EXIT_RESUMABLE

PROGRAM = "python -m flowrl.ppo_flow"
EXIT_INTERRUPTED = 130  # as shells report Ctrl-C


class StopSignal:
    """Remembers SIGTERM or SIGINT until the training loop asks between two updates.

    A second Ctrl-C does not wait: it raises KeyboardInterrupt at once.
    """

    def __init__(self) -> None:
        self._signal: int | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals for the length of the block, in a program's main thread."""
        handled = (signal.SIGTERM, signal.SIGINT)
        before = {number: signal.signal(number, self._handle) for number in handled}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @property
    def requested(self) -> bool:
        """Whether a signal has come."""
        return self._signal is not None

    @property
    def exit_code(self) -> int:
        """The program's exit code once its state is saved."""
        return EXIT_INTERRUPTED if self._signal == signal.SIGINT else EXIT_RESUMABLE

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._signal == signal.SIGINT:
            raise KeyboardInterrupt
        self._signal = number


def main(argv: Sequence[str] | None = None) -> int:
    """Train one run; returns the exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    if console.print_version(words):
        return 0
    console.start_logging()
    own_process = argv is None
    return console.guarded(
        lambda: _train(parse(TrainConfig, words, prog=PROGRAM), own_process=own_process)
    )


def _train(config: TrainConfig, *, own_process: bool) -> int:
    stop = StopSignal()
    with stop.listening():
        if own_process:
            _import_trainer()
        from flowrl.ppo import trainer

        lived_seconds = _process_seconds() if own_process else 0.0
        return trainer.run(config, stop, lived_seconds=lived_seconds)


def _import_trainer() -> None:
    """Import what --help does not wait for, without looking for garbage: imports leave none."""
    # NumPy draws new experts, small matrices: threads gain nothing there, and wait by spinning.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    gc.disable()
    try:
        from flowrl.ppo import trainer  # noqa: F401
    finally:
        gc.freeze()
        gc.enable()


def _process_seconds() -> float:
    """How long this process has lived, its imports included."""
    return max(0.0, time.time() - psutil.Process().create_time())


if __name__ == "__main__":
    sys.exit(main())
