"""What was made of files, remembered by their content: a file that is the same is not parsed again.

The content is read each time, so what somebody else has written is never overlooked.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from flowrl import storage

T = TypeVar("T")


class Remembered(Generic[T]):
    """The last `most` things that were made of files."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: dict[bytes, T] = {}  # by digest of the file

    def of(self, path: Path, make: Callable[[Path], T]) -> T:
        """What `make` makes of the file, now or when it last held the same."""
        digest = _digest(storage.read_bytes(path))
        if digest not in self._known:
            made = make(path)
            if _digest(storage.read_bytes(path)) != digest:
                return made  # of another content by now
            self._put(digest, made)
        return self._known[digest]

    def put(self, content: bytes, made: T) -> None:
        """Know what will be made of a file with this content."""
        self._put(_digest(content), made)

    def _put(self, digest: bytes, made: T) -> None:
        self._known[digest] = made
        while len(self._known) > self._most:
            del self._known[next(iter(self._known))]


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()
