"""Copy standard input to a log file that cannot fill the disk and holds no known secret.

Run by path, `python -I -S capped_log.py LOG`. When the log reaches half of the cap it becomes
`LOG.1` and a new one is begun, so the newest output is always there. It ends at end of file and
not before: whoever writes into the pipe must never be blocked by a signal or a full disk. What
`secrets.json` beside the log lists is replaced, and that file removed as soon as it is read.
"""
# pathlib alone would double the time to start, and so would contextlib, json, re and signal:
# ruff: noqa: PTH100, PTH105, PTH108, PTH118, PTH120, SIM105

from __future__ import annotations

import _signal  # pyright: ignore[reportMissingImports]
import os
import sys

CAP_BYTES = 64 * 2**20
CHUNK_BYTES = 2**16
REDACTED = b"[redacted]"
SECRETS = "secrets.json"
SECRETS_LIMIT_BYTES = 2**20


def main(argv: list[str]) -> int:
    """Copy until end of file."""
    for number in (_signal.SIGHUP, _signal.SIGINT, _signal.SIGQUIT, _signal.SIGTERM):
        _signal.signal(number, _signal.SIG_IGN)
    path = os.path.abspath(argv[0])
    limit = (int(argv[1]) if len(argv) > 1 else CAP_BYTES) // 2
    screen = Screen(take_secrets(os.path.join(os.path.dirname(path), SECRETS)))
    log = open_log(path)
    while chunk := os.read(0, CHUNK_BYTES):
        log = add(path, log, screen.passed(chunk), limit)
    add(path, log, screen.rest(), limit)
    return 0


class Screen:
    """Lets bytes through, secrets excepted, wherever the stream happens to be cut."""

    def __init__(self, secrets: list[bytes]) -> None:
        """Take the secrets, the longest first."""
        self._secrets = [secret for secret in secrets if secret]
        if self._secrets:
            import re  # costs as much time as all else: not where there is nothing to hide

            self._pattern = re.compile(b"|".join(map(re.escape, self._secrets)))
        self._held = b""

    def passed(self, chunk: bytes) -> bytes:
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
    """The words that must not be logged, as the launcher left them here for us to remove."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return []
    with os.fdopen(descriptor, "rb") as file:
        text = file.read(SECRETS_LIMIT_BYTES)
    try:
        os.unlink(path)
    except OSError:
        pass  # it is not there for long
    import json

    return [word.encode() for word in json.loads(text)["secrets"]]


def add(path: str, log: int, text: bytes, limit: int) -> int:
    """Append to the log, or to a new one where it would grow beyond its limit; answers which."""
    try:
        if os.fstat(log).st_size + len(text) > limit:
            os.replace(path, f"{path}.1")
            fresh = open_log(path)
            os.close(log)
            log = fresh
        write_all(log, text)
    except OSError:
        pass  # what a full disk does not take is lost, the trainer goes on
    return log


def open_log(path: str) -> int:
    """A descriptor that appends; one that takes everything and keeps nothing where none can be."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        return os.open(path, flags, 0o600)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY)


def write_all(descriptor: int, chunk: bytes) -> None:
    """Write the whole chunk."""
    while chunk:
        chunk = chunk[os.write(descriptor, chunk) :]


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))
