"""What a trainer said last: the end of its log, and whether it is the error of the time before."""

from __future__ import annotations

import hashlib
import re
import time
from pathlib import Path

from flowrl.parallel.signals import LastWords

TAIL_BYTES = 2**14
SHOWN_LINES = 10
_ERROR_LINES = 5  # that make up the error where there is no traceback
_LINE_CHARACTERS = 300
_QUIET_SECONDS = 0.02
_MOST_LOOKS = 10
_TRACEBACK = "Traceback (most recent call last)"
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")
# What differs between two runs of one program that meet the same error.
_ACCIDENTS = re.compile(r"0x[0-9a-fA-F]+|\b[0-9a-f]{8,}\b|[0-9]+")


def last_words(log: Path) -> LastWords:
    """The last lines of a log that nobody writes to any more, and the digest of its error."""
    lines = _lines(_settled(log))
    return LastWords(lines=tuple(lines[-SHOWN_LINES:]), error=digest(lines))


def digest(lines: list[str]) -> str:
    """A short name of the error that these lines end with; "" when there are none.

    >>> digest(["ValueError: 3 rows at 0x7f01"]) == digest(["ValueError: 4 rows at 0x7f99"])
    True
    """
    starts = [number for number, line in enumerate(lines) if _TRACEBACK in line]
    error = lines[starts[-1] :] if starts else lines[-_ERROR_LINES:]
    if not error:
        return ""
    plain = "\n".join(_ACCIDENTS.sub("#", line) for line in error)
    return hashlib.sha256(plain.encode()).hexdigest()[:16]


def _lines(tail: bytes) -> list[str]:
    """Lines as a terminal would show them, without colours; empty ones are left out."""
    rows = tail.decode(errors="replace").split("\n")
    shown = (_ESCAPES.sub("", row.rstrip("\r").rpartition("\r")[2]).rstrip() for row in rows)
    return [line[:_LINE_CHARACTERS] for line in shown if line]


def _settled(log: Path) -> bytes:
    """The log's tail, once whoever copies it has caught up with the trainer's end."""
    tail = _tail(log)
    for _ in range(_MOST_LOOKS if log.exists() else 0):
        time.sleep(_QUIET_SECONDS)
        newer = _tail(log)
        if newer == tail:
            break
        tail = newer
    return tail


def _tail(log: Path) -> bytes:
    try:
        if not log.is_file() or log.is_symlink():
            return b""
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - TAIL_BYTES))
            return file.read(TAIL_BYTES)
    except OSError:
        return b""
