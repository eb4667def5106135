"""Train one run: `python -m flowrl.ppo_flow --module_path RUN/2.py`.

Reads the generated module, run.json and the seed experts beside it; leaves the final experts
and, last of all, result.json. Ends with 0 when the run is whole, with 85 (SIGTERM) or 130
(Ctrl-C) when it was asked to stop and the same command goes on with it, with 2 for a wrong
command line, and with 1 for anything else, the reason in one line.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Sequence

import psutil

from flowrl import console
from flowrl.config import TrainConfig, parse
from flowrl.ppo.stopping import StopWish

PROGRAM = "python -m flowrl.ppo_flow"


def main(argv: Sequence[str] | None = None) -> int:
    """Train one run; returns the exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    if console.say_version(words):
        return 0
    console.start_logging()
    own_process = argv is None
    return console.guarded(
        lambda: _train(parse(TrainConfig, words, prog=PROGRAM), own_process=own_process)
    )


def _load() -> None:
    """Import what --help need not wait for."""
    # NumPy draws new experts, small matrices: threads gain nothing there, and wait by spinning.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    gc.disable()  # of what is imported nothing becomes garbage, and to look for it takes long
    try:
        from flowrl.ppo import program  # noqa: F401
        from flowrl.program_cache import digest_of_sources
    finally:
        gc.freeze()
        gc.enable()
    digest_of_sources()  # now: the files may change later


def _train(config: TrainConfig, *, own_process: bool) -> int:
    stop = StopWish()
    with stop.listening():
        if own_process:
            _load()
        from flowrl.ppo import program

        lived_seconds = _process_seconds() if own_process else 0.0
        return program.run(config, stop, lived_seconds=lived_seconds)


def _process_seconds() -> float:
    """How long this process has lived, importing and all."""
    return max(0.0, time.time() - psutil.Process().create_time())


if __name__ == "__main__":
    sys.exit(main())
