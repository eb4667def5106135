"""The first process of a host of `two_hosts`: it mounts the shared folder and starts what is asked.

It stands alone, since hosts run it by path, with the standard library alone, to be up at once.
What is asked comes as lines of JSON; jobs of the engine are files that it renames.
"""

from __future__ import annotations

import json
import os
import random
import select
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

MOST_JOBS = 3  # at a time


def main(name: str, shared: str, engine: str) -> None:
    """Serve until the host is killed."""
    socket.sethostname(name)
    children: dict[int, Path | None] = {mount(shared): None}
    asked = b""
    while True:
        if select.select([0], [], [], random.uniform(0.05, 0.15))[0]:
            if not (more := os.read(0, 2**16)):
                return
            asked += more
        *orders, asked = asked.split(b"\n")
        for order in map(json.loads, orders):
            if "argv" in order:
                with Path(order["log"]).open("ab") as log:
                    child = subprocess.Popen(order["argv"], stderr=log, env=order["env"])
                children[child.pid] = Path(order["end"])
            else:
                subprocess.run(["umount", "--lazy", shared], check=True)
                children[mount(shared)] = None
        reap(children)
        if sum(path is not None for path in children.values()) <= MOST_JOBS:
            take_job(name, Path(engine), children)


def mount(shared: str) -> int:
    """Mount the shared folder over itself; returns the process that serves it."""
    options = "nonempty,attr_timeout=0.1,entry_timeout=0.1"
    child = subprocess.Popen(["bindfs", "-f", "-o", options, shared, shared])
    while not os.path.ismount(shared):
        time.sleep(0.01)
    return child.pid


def reap(children: dict[int, Path | None]) -> None:
    """Collect what has ended, and say so of jobs and schedulers."""
    with suppress(ChildProcessError):
        while (end := os.waitpid(-1, os.WNOHANG))[0]:
            path = children.pop(end[0], None)
            if path is None:
                continue
            if path.suffix == ".end":
                path.write_text(str(os.waitstatus_to_exitcode(end[1])))
            else:
                with suppress(FileNotFoundError):  # its engine has given it up
                    path.rename(path.with_suffix(".done"))


def take_job(name: str, engine: Path, children: dict[int, Path | None]) -> None:
    """Start a job that waits, if this host is the first to take it."""
    for queued in engine.glob("*.job"):
        taken = queued.with_suffix(f".{name}")
        with suppress(FileNotFoundError):
            queued.rename(taken)
            words = ["bash", "-c", taken.read_text()]
            children[subprocess.Popen(words, start_new_session=True).pid] = taken
            return


if __name__ == "__main__":
    main(*sys.argv[1:])
