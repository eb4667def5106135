"""Train one run: `python -m flowrl.ppo_flow --module_path RUN/2.py`.

Reads the generated module, run.json and the seed experts beside it; leaves the final experts
and, last of all, result.json. Ends with 0 when the run is whole, with 85 (SIGTERM) or 130
(Ctrl-C) when it was asked to stop and the same command goes on with it, with 2 for a wrong
command line, and with 1 for anything else, the reason in one line.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from flowrl import console
from flowrl.config import TrainConfig, parse
from flowrl.rl.stopping import StopWish

PROGRAM = "python -m flowrl.ppo_flow"


def main(argv: Sequence[str] | None = None) -> int:
    """Train one run; returns the exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    if console.say_version(words):
        return 0
    console.start_logging()
    return console.guarded(lambda: _train(parse(TrainConfig, words, prog=PROGRAM)))


def _train(config: TrainConfig) -> int:
    stop = StopWish()
    with stop.listening():
        from flowrl.rl import program  # loads JAX, for which --help need not wait

        return program.run(config, stop)


if __name__ == "__main__":
    sys.exit(main())
