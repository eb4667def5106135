"""A program: train a graph of skills one after another, `python -m flowrl.bottomup --help`.

This is `flowrl.bottomup_parallel` with one slot, other defaults and no need for tmux.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from flowrl import console
from flowrl.parallel.training import SequentialConfig, train_graph
from flowrl.reports.status import training_screen

PROGRAM = "python -m flowrl.bottomup"


def train(config: SequentialConfig) -> int:
    """Train until every skill has ended, or `flowrl stop`; returns the exit code."""
    return train_graph(config, screen=training_screen)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit code."""
    return console.run_program(PROGRAM, SequentialConfig, train, argv)


if __name__ == "__main__":
    sys.exit(main())
