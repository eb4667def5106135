"""Copy standard input to a log file that cannot fill the disk.

Run by path, `python -I -S capped_log.py LOG`. When the log reaches half of the cap it becomes
`LOG.1` and a new one is begun, so the newest output is always there. It ends at end of file and
not before: whoever writes into the pipe must never be blocked by a signal or a full disk.
"""
# pathlib alone would double the time to start:
# ruff: noqa: PTH100, PTH105

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress

CAP_BYTES = 64 * 2**20
CHUNK_BYTES = 2**16


def main(argv: list[str]) -> int:
    """Copy until end of file."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    path = os.path.abspath(argv[0])
    limit = (int(argv[1]) if len(argv) > 1 else CAP_BYTES) // 2
    log = open_log(path)
    while chunk := os.read(0, CHUNK_BYTES):
        with suppress(OSError):  # what a full disk does not take is lost, the trainer goes on
            if os.fstat(log).st_size + len(chunk) > limit:
                os.replace(path, f"{path}.1")
                fresh = open_log(path)
                os.close(log)
                log = fresh
            write_all(log, chunk)
    return 0


def open_log(path: str) -> int:
    """A descriptor that appends; one that takes everything and keeps nothing where none can be."""
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY)


def write_all(descriptor: int, chunk: bytes) -> None:
    """Write the whole chunk."""
    while chunk:
        chunk = chunk[os.write(descriptor, chunk) :]


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))
