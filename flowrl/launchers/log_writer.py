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
from contextlib import suppress

CAP_BYTES = 64 * 2**20
CHUNK_BYTES = 2**16
REDACTED = b"[redacted]"
SECRETS = "secrets.json"
SECRETS_LIMIT_BYTES = 2**20


def main(argv: list[str]) -> int:
    """Copy until end of file."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    path = os.path.abspath(argv[0])
    limit = (int(argv[1]) if len(argv) > 1 else CAP_BYTES) // 2
    redactor = Redactor(take_secrets(os.path.join(os.path.dirname(path), SECRETS)))
    log = open_log(path)
    while chunk := os.read(0, CHUNK_BYTES):
        log = append(path, log, redactor.feed(chunk), limit)
    append(path, log, redactor.rest(), limit)
    return 0


class Redactor:
    """Replaces secrets in a stream of bytes, wherever the stream happens to be cut."""

    def __init__(self, secrets: list[bytes]) -> None:
        """Take the secrets, the longest first."""
        self._secrets = [secret for secret in secrets if secret]
        self._pattern = re.compile(b"|".join(map(re.escape, self._secrets)))
        self._held = b""

    def feed(self, chunk: bytes) -> bytes:
        """What may be written now; an end that may become a secret is held back."""
        if not self._secrets:
            return chunk
        text = self._held + chunk
        end = len(text) - max(common_end(text, secret) for secret in self._secrets)
        for match in self._pattern.finditer(text):
            if match.start() < end < match.end():
                end = match.start()
        self._held = text[end:]
        return self._pattern.sub(REDACTED, text[:end])

    def rest(self) -> bytes:
        """What was held back and has not become a longer secret."""
        return self._pattern.sub(REDACTED, self._held) if self._secrets else b""


def common_end(text: bytes, secret: bytes) -> int:
    """How many bytes at the end of a text are the beginning of a secret, though not all of it."""
    tail = text[max(0, len(text) - len(secret) + 1) :]
    start = tail.find(secret[:1])
    while start >= 0:
        if secret.startswith(tail[start:]):
            return len(tail) - start
        start = tail.find(secret[:1], start + 1)
    return 0


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
