"""A program: train a graph of skills side by side, `python -m flowrl.bottomup_parallel --help`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from flowrl import console
from flowrl.config import BottomUpConfig
from flowrl.parallel.training import train_graph
from flowrl.reports.status import training_screen

PROGRAM = "python -m flowrl.bottomup_parallel"


def train(config: BottomUpConfig) -> int:
    """Train until every skill has ended, or `flowrl stop`; returns the exit code."""
    return train_graph(config, screen=training_screen)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit code."""
    return console.run_program(PROGRAM, BottomUpConfig, train, argv)


if __name__ == "__main__":
    sys.exit(main())
