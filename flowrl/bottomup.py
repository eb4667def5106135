"""Train a graph of skills one after another: `python -m flowrl.bottomup --help`.

The same parts as `flowrl.bottomup_parallel` with one slot, and the trainer runs in this process:
jax is loaded once. Ctrl-C saves the run under way; the same command goes on with it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from flowrl import console, ppo_flow, runs
from flowrl.bottomup_parallel import train_graph
from flowrl.config import SequentialConfig
from flowrl.errors import EXIT_RESUMABLE, FileRefusedError
from flowrl.launch.job import Exited, Finished, Handle, Job, Lost, Outcome, Why
from flowrl.layout import RunLayout

PROGRAM = "python -m flowrl.bottomup"
_TRAINER_WORDS = 3  # python -m flowrl.ppo_flow


class InProcessLauncher:
    """A Launcher that trains right here: `launch` returns when the run has ended."""

    def __init__(self) -> None:
        self._codes: dict[str, int] = {}  # by run id

    def launch(self, job: Job) -> Handle:
        """Train to the end."""
        code = ppo_flow.main(job.argv[_TRAINER_WORDS:])
        if code == console.EXIT_INTERRUPTED:
            raise KeyboardInterrupt
        self._codes[job.run_id] = code
        return _handle(job)

    def find(self, job: Job) -> Handle | None:
        """A run that ended here, or one that an earlier process brought to its end."""
        ended = job.run_id in self._codes or _result(job.run_id, job.folder) is not None
        return _handle(job) if ended else None

    def poll(self, handle: Handle, folder: Path) -> Outcome | None:
        """How it ended."""
        result = _result(handle.run_id, folder)
        code = self._codes.get(handle.run_id)
        if result is not None and code in (0, None):
            return Finished(result)
        if code is None:
            return Lost("the process that trained it has ended")
        if code == EXIT_RESUMABLE:
            return Exited(why=Why.STOPPED, code=code, detail="stopped, and can go on")
        why = Why.NO_RESULT if code == 0 else Why.EXIT
        return Exited(why=why, code=code, detail=f"the trainer ended with code {code}")

    def cancel(self, handle: Handle, folder: Path) -> None:
        """Nothing to do: no run outlives `launch`."""

    def wait(self, handles: Collection[Handle], *, timeout_seconds: float) -> None:
        """Return at once: no run outlives `launch`."""

    def close(self) -> None:
        """Nothing is held."""


def _handle(job: Job) -> Handle:
    return Handle(run_id=job.run_id, session="", pid=os.getpid())


def _result(run_id: str, folder: Path) -> runs.RunResult | None:
    try:
        result = runs.read_result(RunLayout(folder, 0))
    except FileRefusedError:
        return None
    return result if result.run_id == run_id else None


def train_sequentially(config: SequentialConfig) -> int:
    """Train until every skill has ended; 0 when all that was asked for is completed."""
    return train_graph(config, InProcessLauncher())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit code."""
    return console.run_program(PROGRAM, SequentialConfig, train_sequentially, argv)


if __name__ == "__main__":
    sys.exit(main())
