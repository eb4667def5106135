"""The program that trains independent learners: `python -m flowrl.independent --world WORLD`.

Leaves a checkpoint of every agent and, last of all, result.json in its run folder. Ends with 0 when
the run is whole, with 85 (SIGTERM) or 130 (Ctrl-C) when it was asked to stop and the same command
goes on with it, with 2 for a wrong command line, with 65 when no agent is left that learns, and
with 1 for anything else, the reason in one line.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

from flowrl import arguments, console
from flowrl.command_line import parse
from flowrl.console import StopSignal
from flowrl.errors import ConfigError, closest
from flowrl.multiagent.config import EvaluateAgents, IndependentConfig

PROGRAM = "python -m flowrl.independent"


def main(argv: Sequence[str] | None = None) -> int:
    """Train independent learners, or evaluate trained ones; returns the exit code."""

    def run(words: Sequence[str]) -> int:
        if words[:1] == ["evaluate"]:
            prog = f"{PROGRAM} evaluate"
            return _evaluate(arguments.read(EvaluateAgents, words[1:], prog=prog, layers={})[0])
        if near := closest(words[0] if words else "", ["evaluate"]):
            raise ConfigError(f"there is no command {words[0]!r}{near}")
        return _train(parse(IndependentConfig, words, prog=PROGRAM))

    return console.run_words(run, argv)


def _evaluate(command: EvaluateAgents) -> int:
    from flowrl.multiagent.evaluate import evaluate

    return evaluate(command)


def _train(config: IndependentConfig) -> int:
    if config.debug:
        logging.getLogger("flowrl").setLevel(logging.DEBUG)
    stop = StopSignal("epoch")
    with stop.listening():
        from flowrl.multiagent import run  # --help does not wait for jax

        return run.train(config, stop)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # the thread of a world that hangs would hold up a usual exit
