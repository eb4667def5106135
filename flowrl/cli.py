"""The program `flowrl`: show a graph, control its scheduler, repair it, evaluate its experts."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import tyro

from flowrl import console
from flowrl.commands.check import CheckCommand
from flowrl.commands.control import (
    CancelCommand,
    PauseCommand,
    PriorityCommand,
    ResumeCommand,
    RetryCommand,
    StopCommand,
)
from flowrl.commands.evaluate import EvaluateCommand
from flowrl.commands.logs import LogsCommand
from flowrl.commands.repair import FsckCommand, RecoverCommand, RollbackCommand
from flowrl.commands.status import StatusCommand

COMMANDS = {
    "status": StatusCommand,
    "logs": LogsCommand,
    "evaluate": EvaluateCommand,
    "check": CheckCommand,
    "retry": RetryCommand,
    "pause": PauseCommand,
    "resume": ResumeCommand,
    "cancel": CancelCommand,
    "priority": PriorityCommand,
    "stop": StopCommand,
    "fsck": FsckCommand,
    "rollback": RollbackCommand,
    "recover": RecoverCommand,
}
DESCRIPTION = """flowrl trains a graph of skills in parallel and merges them into one agent.

To train: python -m flowrl.bottomup_parallel --help (or flowrl.bottomup, one at a time)."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    if console.print_version(words):
        return 0
    console.start_logging()
    command = tyro.extras.subcommand_cli_from_dict(
        COMMANDS, args=words or ["--help"], prog="flowrl", description=DESCRIPTION
    )
    return console.guarded(command)


if __name__ == "__main__":
    sys.exit(main())
