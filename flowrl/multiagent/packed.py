"""Packed skills: the runs of several skills train as threads of one process.

A run's own process stays what its launcher knows: it has the session, the log and the signals. It
hands the run over to the shared trainer, which it starts if there is none, and waits. They talk
through a socket in the pack's folder: the run's command line and its log go there, a request to
stop may follow, and the exit code comes back. Each end notices by the socket that the other is
gone. Nothing is computed together, so a packed run ends with the same bits as one by itself; what
is saved is the start of a process, its memory and its compiled programs for every further run.

The shared trainer holds the lock of every run that it trains, too, so no second one can begin
while a thread still writes into the run's folder: it ends after the update in which its own process
was killed. One that hangs keeps the lock until somebody kills the shared trainer.
"""

from __future__ import annotations

import json
import logging
import os
import select
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from flowrl import console, storage
from flowrl.config import parse, to_argv
from flowrl.errors import EXIT_RESUMABLE, LaunchError
from flowrl.launchers.run_status import SHARED_TRAINER
from flowrl.paths import JobPaths
from flowrl.runs import TrainConfig
from flowrl.storage import locks

logger = logging.getLogger(__name__)
_IDLE_SECONDS = 2.0  # the dependants of a finished run start sooner
_MOST_RUNS = 16  # of one shared trainer; JAX keeps some memory of each
_LOCK_SECONDS = 60.0
_LOOK_SECONDS = 0.2  # between two looks for a request to stop
_MOST_BYTES = 2**16  # of a message
_MOST_FILES = 2  # log and lock


def train(config: TrainConfig, stop: Callable[[], int | None]) -> int | None:
    """Have a run trained by the shared trainer of its pack; returns the run's exit code.

    None means that the pack is full. `stop` returns an exit code to stop with, or None.

    Raises:
      LaunchError: the shared trainer was killed.
    """
    folder = config.pack_folder or Path()
    with _connected(folder, config.pack) as connection:
        files = [sys.stderr.fileno(), *_locks_of(config.module_path.absolute().parent)]
        request = json.dumps({"argv": to_argv(config)}).encode()
        with suppress(BrokenPipeError):  # it has answered at once, as a full one does
            socket.send_fds(connection, [request], files)
        if answer := _answer(connection, stop):
            return answer["exit"]
    raise LaunchError(
        f"the shared trainer was killed; see {_log(folder)}. The run goes on from its last "
        "checkpoint when it is started again"
    )


def main(argv: Sequence[str]) -> int:
    """Be the shared trainer of a folder, for at most so many runs, that listens at a descriptor."""
    folder, most, server = Path(argv[0]), int(argv[1]), socket.socket(fileno=int(argv[2]))
    console.start_logging()
    runs: list[threading.Thread] = []
    while True:
        asked = bool(select.select([server], [], [], _IDLE_SECONDS)[0])
        live = [run for run in runs if run.is_alive()]
        if asked:
            runs += _begin(server, room=len(live) < most)
        idle = not asked and not live
        if (idle or len(runs) >= _MOST_RUNS) and _leave(folder, server):
            for run in runs:
                run.join()
            return 0


def _begin(server: socket.socket, *, room: bool) -> list[threading.Thread]:
    """Begin the run that asks, in a thread; none without room."""
    connection, _ = server.accept()
    if room:
        thread = threading.Thread(target=_serve, args=(connection,))
        thread.start()
        return [thread]
    with connection, suppress(ConnectionError):
        connection.send(json.dumps({"exit": None}).encode())
    return []


def _leave(folder: Path, server: socket.socket) -> bool:
    """Listen no more, unless a run asks just now; further runs start another trainer."""
    with locks.held(folder / "lock", timeout_seconds=_LOCK_SECONDS):  # nobody else connects
        if select.select([server], [], [], 0)[0]:
            return False
        storage.remove_file(folder / "socket")
        server.close()
        return True


def _serve(connection: socket.socket) -> None:
    """Train one run in this thread, and send its exit code when it has ended."""
    with connection, suppress(ConnectionError):
        request, files, *_ = socket.recv_fds(connection, _MOST_BYTES, _MOST_FILES)
        if not files:
            return  # it was killed
        code = 1
        try:
            with os.fdopen(files[0], "w", buffering=1) as log:
                code = _train(json.loads(request)["argv"], _stop_of(connection), log)
        finally:
            for held in files[1:]:
                os.close(held)
            connection.send(json.dumps({"exit": code}).encode())


def _train(argv: Sequence[str], stop: Callable[[], int | None], log: Any) -> int:
    """As `ppo_flow` trains a run; what this thread logs goes to the run's log, too."""
    from flowrl.ppo import trainer  # the run's own process does not load JAX

    own = threading.get_ident()
    handler = console.log_handler(log)
    handler.addFilter(lambda record: record.thread == own)
    logging.getLogger("flowrl").addHandler(handler)
    try:
        config = parse(TrainConfig, argv, prog="python -m flowrl.ppo_flow")
        return console.guarded(lambda: trainer.run(config, stop), log)
    except BaseException:  # a bug, or no memory: this run ends alone
        traceback.print_exc(file=log)
        raise
    finally:
        logging.getLogger("flowrl").removeHandler(handler)


def _stop_of(connection: socket.socket) -> Callable[[], int | None]:
    """What says whether a run is to stop: its own process asked for it, or is gone."""
    asked: list[int] = []

    def stop() -> int | None:
        if not asked and select.select([connection], [], [], 0)[0]:
            message = b""
            with suppress(ConnectionError):
                message = connection.recv(_MOST_BYTES)
            asked.append(int(message or EXIT_RESUMABLE))
        return asked[0] if asked else None

    return stop


def _answer(connection: socket.socket, stop: Callable[[], int | None]) -> dict[str, Any] | None:
    """What the shared trainer says when the run has ended; None if it was killed."""
    asked = False
    with suppress(ConnectionError):
        while not select.select([connection], [], [], _LOOK_SECONDS)[0]:
            if not asked and (code := stop()) is not None:
                connection.send(str(code).encode())
                asked = True
        if message := connection.recv(_MOST_BYTES):
            return json.loads(message)
    return None


@contextmanager
def _connected(folder: Path, most: int) -> Iterator[socket.socket]:
    """A connection to the shared trainer, which is started if there is none."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        with locks.held(folder / "lock", timeout_seconds=_LOCK_SECONDS):
            opened = os.open(folder, os.O_PATH | os.O_DIRECTORY)
            try:
                address = f"/proc/self/fd/{opened}/socket"  # a path may be too long for a socket
                try:
                    connection.connect(address)
                except (FileNotFoundError, ConnectionRefusedError):
                    storage.remove_file(folder / "socket")
                    _start(folder, address, most)
                    connection.connect(address)
            finally:
                os.close(opened)
        yield connection


def _start(folder: Path, address: str, most: int) -> None:
    """Start the shared trainer; it listens at once, and ends when it has had no run for a while."""
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server,
        _log(folder).open("wb") as log,
    ):
        server.bind(address)
        server.listen()
        own = str(server.fileno())
        subprocess.Popen(
            [sys.executable, "-m", SHARED_TRAINER, str(folder), str(most), own],
            pass_fds=[server.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # it outlives the run that starts it
        )


def _locks_of(run_folder: Path) -> list[int]:
    """The descriptor of the run's lock; none if no launcher has started this process."""
    path = JobPaths(run_folder).lock
    if not path.exists():
        return []
    lock = path.stat()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the listing's own
            if os.path.samestat(entry.stat(), lock):
                return [int(entry.name)]
    return []


def _log(folder: Path) -> Path:
    return folder / "trainer.log"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
