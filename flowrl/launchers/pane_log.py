"""The log of a run in a tmux pane: the runner forks its writer, since its own Python is up.

What tmux pipes out of a pane goes to a process that tmux starts. A second Python there took as long
to start as the runner, and at the same time. So that process is a `cat` into a named pipe that the
launcher has made in the run's folder. Its other end is read by a fork of the runner, and it loses
its name as soon as both are there. The fork is in a session of its own and holds no lock: it ends
when the pane's pipe does, whatever becomes of the runner.

It is part of the runner, so it takes nothing but the standard library.
"""
# pathlib alone would double the time to start:
# ruff: noqa: PTH108, PTH110, PTH118

from __future__ import annotations

import _signal  # pyright: ignore[reportMissingImports]
import os
import select
import time
from stat import S_ISFIFO  # os has it already

PIPE = ".log.pipe"
LOG_SECONDS = 30.0
LOG_PAUSE_SECONDS = 0.002
_MOST_FILES = 64  # that a runner has open when it begins


def begin(folder: str, pipe: str = "") -> None:
    """Fork the log's writer, if the launcher has left a pipe for it, here or in the folder.

    Where there can be none, the run goes on without a log.
    """
    path = pipe or os.path.join(folder, PIPE)
    if not os.path.exists(path):
        return
    try:
        if os.fork():
            return
    except OSError as error:
        os.write(2, f"flowrl: nobody writes the log: {error}\n".encode())
        return
    code = 1
    try:
        code = write_log(path, folder)
    finally:
        os._exit(code)


def write_log(path: str, folder: str) -> int:
    """Be the log's writer: copy what comes through the pipe, once the run is launched."""
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):  # the pane is not kept open
        os.dup2(nothing, number)
    os.closerange(3, _MOST_FILES)
    _signal.alarm(int(LOG_SECONDS))  # if nobody ever opens the other end, it ends us
    pipe = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    _signal.alarm(0)
    if not S_ISFIFO(os.fstat(pipe).st_mode):
        return 1
    os.unlink(path)
    os.dup2(pipe, 0)
    os.close(pipe)
    from flowrl.launchers import capped_log  # nobody but the fork needs it

    if not await_folder(folder):
        return 1
    return capped_log.main([os.path.join(folder, "training.log")])


def await_folder(folder: str) -> bool:
    """Wait until the run is launched, for which it may be early; False if its pane ends before."""
    poll = select.poll()
    poll.register(0, 0)  # says when nobody can write any more
    while not os.path.exists(os.path.join(folder, "spec.json")):
        if poll.poll(1000 * LOG_PAUSE_SECONDS):
            return False
    return True


def await_log(folder: str) -> None:
    """Let the log's writer read what it must not write before there is anything to write.

    It takes the list away. Where there is no writer, there is no log either.
    """
    deadline = time.monotonic() + LOG_SECONDS
    while os.path.exists(os.path.join(folder, "secrets.json")) and time.monotonic() < deadline:
        time.sleep(LOG_PAUSE_SECONDS)
