"""Copy standard input to a log file that cannot fill the disk and holds no known secret.

It runs by path, `python -I -S log_writer.py LOG [CAP_BYTES]`, behind a tmux pane or a job's pipe.
When the log reaches half of the cap it becomes `LOG.1` and a new one begins, so the newest output
is always there. It ends at end of file and not before: neither a signal nor a full disk may block
the process that writes into the pipe. The values that `secrets.json` beside the log lists are
replaced, and that file is removed as soon as it is read.
"""
# ruff: noqa: PTH100, PTH105, PTH108, PTH118, PTH120 — pathlib loads slowly

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress

CAP_BYTES = 64 * 2**20
CHUNK_BYTES = 2**16
REDACTED = b"[redacted]"
SECRETS_LIMIT_BYTES = 2**20


def main(argv: list[str]) -> int:
    """Copy until end of file."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    path = os.path.abspath(argv[0])
    limit = (int(argv[1]) if len(argv) > 1 else CAP_BYTES) // 2
    secrets = take_secrets(os.path.join(os.path.dirname(path), "secrets.json"))
    log = open_log(path)
    for text in redacted(iter(lambda: os.read(0, CHUNK_BYTES), b""), secrets):
        log = append(path, log, text, limit)
    return 0


def redacted(chunks: Iterable[bytes], secrets: list[bytes]) -> Iterator[bytes]:
    """Yield a stream without its secrets, wherever it happens to be cut.

    What may become a secret is held back until enough has come to tell.
    """
    if not secrets:
        yield from chunks
        return
    secrets = sorted(secrets, key=len, reverse=True)
    pattern = re.compile(b"|".join(map(re.escape, secrets)))
    held = b""
    for chunk in chunks:
        text = held + chunk
        end = undecided(text, 0, secrets)
        for match in pattern.finditer(text):
            if end <= match.start():
                break
            end = undecided(text, match.end(), secrets)
        held = text[end:]
        yield pattern.sub(REDACTED, text[:end])
    yield pattern.sub(REDACTED, held)


def undecided(text: bytes, start: int, secrets: list[bytes]) -> int:
    """Return where the rest of a text first is the beginning of a secret; its end if nowhere.

    `secrets` are sorted, the longest first.
    """
    first_bytes = {secret[0] for secret in secrets}
    for place in range(max(start, len(text) - len(secrets[0]) + 1), len(text)):
        if text[place] in first_bytes:
            tail = text[place:]
            if any(len(tail) < len(secret) and secret.startswith(tail) for secret in secrets):
                return place
    return len(text)


def take_secrets(path: str) -> list[bytes]:
    """The values that must not be logged; the launcher has left the list for us to remove."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return []
    with os.fdopen(descriptor, "rb") as file:
        text = file.read(SECRETS_LIMIT_BYTES)
    with suppress(OSError):
        os.unlink(path)
    return [value.encode() for value in json.loads(text)["secrets"]]


def append(path: str, log: int, text: bytes, limit: int) -> int:
    """Append to the log, or to a new one where it would grow beyond its limit; returns which."""
    with suppress(OSError):  # what a full disk does not take is lost, the job goes on
        if os.fstat(log).st_size + len(text) > limit:
            os.replace(path, f"{path}.1")
            fresh = open_log(path)
            os.close(log)
            log = fresh
        while text:
            text = text[os.write(log, text) :]
    return log


def open_log(path: str) -> int:
    """A descriptor that appends to the log; /dev/null where no log can be made."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        return os.open(path, flags, 0o600)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY)


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))
