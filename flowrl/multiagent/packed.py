"""Packed skills: the runs of several skills train as threads of one process.

A run's own process stays what its launcher knows: it has the session, the log and the signals. It
hands the run over to the shared trainer, which it starts if there is none, and waits. They talk
through a socket in the pack's folder: the run's command line and its log go there, a request to
stop may follow, and the exit code comes back. Each end notices by the socket that the other is
gone. Nothing is computed together, so a packed run ends with the same bits as one by itself; what
is saved is the start of a process, its memory and its compiled programs for every further run.

The shared trainer holds the lock of every run that it trains, too, so no second one can begin
while a thread still writes into the run's folder: it ends after the update in which its own process
was killed. A thread that hangs cannot be ended, so the whole shared trainer ends instead.
"""

from __future__ import annotations

import json
import logging
import os
import select
import shlex
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack, chdir, suppress
from pathlib import Path
from typing import TextIO

from flowrl import console, storage
from flowrl.config import parse, to_argv
from flowrl.errors import EXIT_RESUMABLE, BusyError, SharedTrainerError
from flowrl.launchers.run_status import SHARED_TRAINER
from flowrl.paths import JobPaths
from flowrl.runs import TrainConfig, digest_of_sources
from flowrl.storage import locks

logger = logging.getLogger(__name__)
_SOCKET, _LOG = "socket", "trainer.log"
_LINE = "%(asctime)s %(threadName)s: %(message)s"  # a run's thread has the name of its folder
_IDLE_SECONDS = 5.0  # the dependants of a finished run start sooner
_MOST_RUNS = 16  # of one shared trainer; JAX keeps some memory of each
_HUNG_SECONDS = 600.0  # after its own process has ended; no update takes as long
_LOCK_SECONDS = 60.0
_LOOK_SECONDS = 0.2  # between two looks for a request to stop
_MOST_BYTES = 2**16  # of a message
_MOST_FILES = 2  # log and lock


def train(config: TrainConfig, stop: Callable[[], int | None]) -> int | None:
    """Have a run trained by the shared trainer of its pack; returns the run's exit code.

    None means that the shared trainer takes no more runs now. `stop` returns an exit code to stop
    with, or None.

    Raises:
      SharedTrainerError: the shared trainer has ended before the run.
    """
    folder = (config.pack_folder or Path()).absolute()
    with suppress(ConnectionError), _connection(folder, config.pack) as connection:
        files = [sys.stderr.fileno(), *_locks_of(config.module_path.absolute().parent)]
        request = json.dumps([digest_of_sources(), *to_argv(config)]).encode()
        socket.send_fds(connection, [request], files)
        while not select.select([connection], [], [], _LOOK_SECONDS)[0]:
            if code := stop():
                connection.send(str(code).encode())
        if answer := connection.recv(_MOST_BYTES):
            return json.loads(answer)
    raise SharedTrainerError(
        f"the shared trainer has ended; see {folder / _LOG}. The run goes on from its last "
        "checkpoint when it is started again"
    )


def main(argv: Sequence[str]) -> int:
    """Be the shared trainer of a folder, with most runs, listening descriptor and digest of code.

    Whatever ends the loop, it listens no more, and the runs that it has begun go on to their ends.
    """
    folder, most, code = Path(argv[0]), int(argv[1]), argv[3]
    console.start_logging(_LINE)
    runs: list[threading.Thread] = []
    with ExitStack() as at_the_end, socket.socket(fileno=int(argv[2])) as server:
        while True:
            asked = bool(select.select([server], [], [], _IDLE_SECONDS)[0])
            live = [run for run in runs if run.is_alive()]
            if asked:
                room = len(live) < most
                own = (server.accept()[0], code if room else "")
                run = threading.Thread(target=_serve, args=own)
                run.start()
                at_the_end.callback(run.join)
                runs += [run] * room
            idle = not asked and not live
            if (idle or len(runs) >= _MOST_RUNS) and _leave(folder, server):
                return 0


def _leave(folder: Path, server: socket.socket) -> bool:
    """Listen no more, unless a run asks just now; further runs start another trainer."""
    with (
        suppress(BusyError),  # later
        locks.held(folder / "lock", timeout_seconds=_LOCK_SECONDS),  # nobody else connects
    ):
        if not select.select([server], [], [], 0)[0]:
            server.close()
            return True
    return False


def _serve(connection: socket.socket, code: str) -> None:
    """Have one run of this code trained by a thread; its own process may stop it, or be gone."""
    with connection:
        request, files, *_ = socket.recv_fds(connection, _MOST_BYTES, _MOST_FILES)
        if not files:
            return  # it was killed
        stops: list[int] = []
        its_code, *words = json.loads(request)
        argv = words if its_code == code else None
        run = threading.Thread(target=_run, args=(connection, argv, files, stops))
        run.start()
        with suppress(ConnectionError):
            while stop := connection.recv(_MOST_BYTES):
                stops.append(int(stop))
        stops.append(EXIT_RESUMABLE)
        run.join(_HUNG_SECONDS)
        if run.is_alive():
            hung = f"a run hangs, {_HUNG_SECONDS:g} s after its own process has ended"
            own = shlex.join(argv or ())
            logger.error("%s: %s; all runs go on from their last checkpoints", hung, own)
            os._exit(1)


def _run(
    connection: socket.socket, argv: list[str] | None, files: list[int], stops: list[int]
) -> None:
    """Train one run, if it is to be, free its lock, and send its exit code."""
    code = 1
    try:
        with os.fdopen(files[0], "w", buffering=1) as log:
            code = argv and _train(argv, lambda: next(iter(stops), None), log)
    finally:
        for held in files[1:]:
            os.close(held)
        with suppress(ConnectionError):
            connection.send(json.dumps(code).encode())


def _train(argv: Sequence[str], stop: Callable[[], int | None], log: TextIO) -> int:
    """As `ppo_flow` trains a run; what this thread logs goes to the run's log, too."""
    from flowrl.ppo import trainer  # the run's own process does not load JAX

    own = threading.get_ident()
    handler = console.log_handler(log)
    handler.addFilter(lambda record: record.thread == own)
    logging.getLogger("flowrl").addHandler(handler)
    try:
        config = parse(TrainConfig, argv, prog="python -m flowrl.ppo_flow")
        threading.current_thread().name = config.module_path.absolute().parent.name
        return console.guarded(lambda: trainer.run(config, stop), log)
    except BaseException:  # a bug, or no memory: this run ends alone
        traceback.print_exc(file=log)
        raise
    finally:
        logging.getLogger("flowrl").removeHandler(handler)


def _connection(folder: Path, most: int) -> socket.socket:
    """A connection to the shared trainer, which is started if there is none."""
    here, connection = Path.cwd(), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with (
        locks.held(folder / "lock", timeout_seconds=_LOCK_SECONDS),
        chdir(folder),  # its path may be too long for a socket's address
    ):
        try:
            connection.connect(_SOCKET)
        except (FileNotFoundError, ConnectionRefusedError):
            storage.remove_file(folder / _SOCKET)
            _start(folder, here, most)
            connection.connect(_SOCKET)
    return connection


def _start(folder: Path, here: Path, most: int) -> None:
    """Start the shared trainer; it listens at once, and ends when it has had no run for a while."""
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server,
        (folder / _LOG).open("ab") as log,
    ):
        server.bind(_SOCKET)
        server.listen()
        own = [str(folder), str(most), str(server.fileno()), digest_of_sources()]
        subprocess.Popen(
            [sys.executable, "-m", SHARED_TRAINER, *own],
            cwd=here,
            pass_fds=[server.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # it outlives the run that starts it
        )


def _locks_of(run_folder: Path) -> list[int]:
    """The descriptor of the run's lock; none if no launcher has started this process."""
    lock, files = JobPaths(run_folder).lock, Path("/proc/self/fd").iterdir()
    return [int(it.name) for it in files if lock.exists() and it.exists() and it.samefile(lock)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
