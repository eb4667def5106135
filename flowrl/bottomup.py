"""Train a graph of skills one after another: `python -m flowrl.bottomup --help`.

This is `flowrl.bottomup_parallel` with one slot and a launcher that trains in this process, so that
jax is loaded once. Ctrl-C saves the current run; the same command continues it.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from flowrl import console, ppo_flow, storage
from flowrl.bottomup_parallel import train_graph
from flowrl.config import SequentialConfig
from flowrl.errors import EXIT_RESUMABLE, FileRefusedError
from flowrl.launchers import run_status
from flowrl.launchers.base import (
    ExitCause,
    Exited,
    Finished,
    Handle,
    Job,
    Lost,
    Outcome,
)
from flowrl.launchers.process import EndWatcher
from flowrl.parallel.run_folder import result_of
from flowrl.paths import RunPaths
from flowrl.runs import RunResult

PROGRAM = "python -m flowrl.bottomup"
ON_INTERRUPT = "stopped; the run that was training continues from its checkpoint."
_CRASHED = 1  # the exit code of a process that ends with a traceback
_DEVICE_VARIABLES = (
    "CUDA_DEVICE_ORDER",
    "CUDA_VISIBLE_DEVICES",
    "JAX_PLATFORMS",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
)

logger = logging.getLogger(__name__)


class InProcessLauncher:
    """A `Launcher` that trains in this process: `launch` returns when the run has ended.

    Like other launchers it adopts runs that another program started in a session.
    """

    def __init__(self) -> None:
        self._codes: dict[str, int] = {}  # exit codes of the runs trained here, by run id
        self._watcher = EndWatcher()

    def launch(self, job: Job) -> Handle:
        """Train to the end; a run that lives in another process is adopted.

        Raises:
          KeyboardInterrupt: the trainer was asked to stop, by Ctrl-C or SIGTERM.
          LaunchError: a process of the run lives that cannot be adopted.
        """
        known = run_status.find_living(job)
        if known is not None:
            return known
        run_status.prepare(job, grace_seconds=0.0)
        _take_resources(job)
        with _logged(RunPaths(job.folder, 0).training_log):
            code = _train(job)
        if code in (console.EXIT_INTERRUPTED, EXIT_RESUMABLE):
            raise KeyboardInterrupt
        self._codes[job.run_id] = code
        return _handle(job)

    def find(self, job: Job) -> Handle | None:
        """Return the handle of a run that ended here or that another process started or ended."""
        if job.run_id in self._codes:
            return _handle(job)
        ended = _result(job.run_id, job.folder) is not None
        return run_status.find(job) or (_handle(job) if ended else None)

    def poll(self, handle: Handle, folder: Path) -> Outcome | None:
        """Return how a run ended; None while it lives in another process."""
        code = self._codes.get(handle.run_id)
        if code is None and not _is_ours(handle):
            return run_status.outcome(handle, folder)
        if code == 0 or (code is None and _result(handle.run_id, folder) is not None):
            return Finished(folder)
        if code is None:
            return Lost("the process that trained it has ended")
        detail = f"the trainer ended with code {code}"
        return Exited(cause=ExitCause.EXIT, code=code, detail=detail)

    def stop(self, handle: Handle, folder: Path) -> None:
        """Ask a run of another process to stop; one that is trained here ends before `launch`."""
        if not _is_ours(handle):
            run_status.request_stop(folder)

    def wait(self, handles: Collection[Handle], *, timeout_seconds: float) -> bool:
        """Wait until a run may have ended (returns True), or for the timeout (returns False)."""
        if any(_is_ours(handle) for handle in handles):
            return True  # `launch` has trained it
        return self._watcher.wait(handles, timeout_seconds=timeout_seconds)

    def close(self) -> None:
        """Do nothing: this launcher holds no resources."""


class _LogFile(logging.Handler):
    """Copies the log into a run's training.log; lines are dropped while the disk is full."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))

    def emit(self, record: logging.LogRecord) -> None:
        """Append a log record."""
        try:
            storage.append_line(self._path, self.format(record))
        except OSError:
            return


@contextmanager
def _logged(path: Path) -> Iterator[None]:
    handler = _LogFile(path)
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)


def _take_resources(job: Job) -> None:
    """Use the job's CPUs, and its device if JAX has not chosen one yet."""
    if job.cpus:
        os.sched_setaffinity(0, job.cpus)
    if "jax" not in sys.modules:
        os.environ.update({name: job.env[name] for name in _DEVICE_VARIABLES if name in job.env})


def _train(job: Job) -> int:
    """Train, and return the exit code that a trainer process would have."""
    logger.info("training %s, run %s, in this process", job.folder.name, job.run_id)
    try:
        code = ppo_flow.main(job.argv[3:])  # after `python -m flowrl.ppo_flow`
    except (RuntimeError, MemoryError):  # JAX raises these when a device is out of memory
        logger.exception("run %s has crashed", job.run_id)
        return _CRASHED
    result = _result(job.run_id, job.folder)
    outcome = f"exit code {code}" if result is None else _describe(result)
    logger.info("run %s has ended: %s", job.run_id, outcome)
    return code


def _describe(result: RunResult) -> str:
    steps = ", ".join(f"{share:.0%}" for share in result.step_success)
    return (
        f"{result.frames:,} frames, {result.updates:,} updates, {result.wall_seconds:.0f} s, "
        f"success {result.success_rate:.0%} (by step: {steps})"
    )


def _handle(job: Job) -> Handle:
    return Handle(run_id=job.run_id, session="", pid=os.getpid())


def _is_ours(handle: Handle) -> bool:
    """Return whether this program trained the run: its handles name no session."""
    return not handle.session


def _result(run_id: str, folder: Path) -> RunResult | None:
    try:
        return result_of(RunPaths(folder, 0), run_id)
    except FileRefusedError:
        return None


def train_sequentially(config: SequentialConfig) -> int:
    """Train until every skill has ended; returns 0 if all requested skills are completed."""
    return train_graph(config, InProcessLauncher(), live=False)  # the trainer has a live table


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit code."""
    return console.run_program(
        PROGRAM, SequentialConfig, train_sequentially, argv, on_interrupt=ON_INTERRUPT
    )


if __name__ == "__main__":
    sys.exit(main())
