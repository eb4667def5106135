"""One daemon per folder: a lock that the kernel frees when its holder dies, and that names it."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from datetime import UTC, datetime
from pathlib import Path

from flowrl import storage
from flowrl.errors import BusyError, ConfigError
from flowrl.storage import locks

_NETWORK = frozenset({"nfs", "nfs4", "cifs", "smb3"})
_GLANCE_SECONDS = 0.1
_MOUNTS = Path("/proc/self/mountinfo")


class Claim:
    """The right to write in a graph's folder; the lock file is never deleted."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    @property
    def held(self) -> bool:
        """Whether this process has the claim."""
        return self._descriptor is not None

    def acquire(self) -> None:
        """Take the claim, at once or not at all.

        Raises:
          BusyError: another daemon has it; the message names that one.
          ConfigError: the folder is on a network file system, whose locks cannot be trusted.
          FileRefusedError: the lock is no plain file.
        """
        if self.held:
            return
        storage.make_dir(self._path.parent)
        _refuse_network(self._path.parent)
        if not os.path.lexists(self._path):
            storage.make_file(self._path)
        # Only to be read: what is open for writing would keep a disk from being made read-only.
        descriptor = locks.open_plain_lock(self._path)
        try:
            _lock(descriptor)
            _name_holder(self._path)
        except BlockingIOError as error:
            os.close(descriptor)
            raise BusyError(
                f"{self._path.parent} is in use by {holder(self._path)}; stop that daemon or "
                "choose another --graph_path"
            ) from error
        except OSError:
            os.close(descriptor)
            raise
        self._descriptor = descriptor

    def check(self) -> None:
        """Make sure that the lock file is still the one we hold.

        Raises:
          BusyError: it was deleted or replaced, so another daemon may have started.
        """
        if self._descriptor is None:
            return
        mine = os.fstat(self._descriptor)
        try:
            there = self._path.stat(follow_symlinks=False)
        except FileNotFoundError:
            there = None
        if there is None or (there.st_dev, there.st_ino) != (mine.st_dev, mine.st_ino):
            raise BusyError(
                f"{self._path} was deleted or replaced while this daemon held it, another one may "
                "have started; runs go on, start again to adopt them"
            )

    def release(self) -> None:
        """Give the claim back."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def holder(path: Path) -> str:
    """Who holds the lock, in words."""
    try:
        facts = json.loads(path.read_bytes()[:4096])
        return f"process {facts['pid']} on {facts['host']} since {facts['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


def daemon_of(path: Path) -> str | None:
    """The daemon that holds the lock now, in words; None while nobody does.

    Raises:
      FileRefusedError: the lock is no plain file.
    """
    try:
        descriptor = locks.open_plain_lock(path)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return holder(path)
    finally:
        os.close(descriptor)
    return None


def filesystem_of(path: Path, mounts: str) -> str:
    """The type of the file system that holds `path`, by the text of a mountinfo file.

    >>> mounts = "1 0 0:1 / / rw - ext4 a rw\\n2 1 0:2 / /home rw - nfs4 b rw"
    >>> filesystem_of(Path("/home/x"), mounts)
    'nfs4'
    """
    found = ("", "unknown")
    for line in mounts.splitlines():
        left, _, right = line.partition(" - ")
        mount = left.split(" ")[4].replace("\\040", " ")
        inside = path == Path(mount) or Path(mount) in path.parents
        if inside and len(mount) >= len(found[0]):
            found = (mount, right.split(" ")[0])
    return found[1]


def _refuse_network(folder: Path) -> None:
    try:
        kind = filesystem_of(folder.resolve(), _MOUNTS.read_text(encoding="utf-8"))
    except OSError:
        return  # no /proc: nothing is known against it
    if kind in _NETWORK:
        raise ConfigError(
            f"{folder} is on {kind}, where two daemons on two hosts could both hold the lock; "
            "choose a --graph_path on a local disk"
        )


def _lock(descriptor: int) -> None:
    """Take the lock; whoever only looks at it, as `daemon_of` does, has it for an instant."""
    until = time.monotonic() + _GLANCE_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > until:
                raise
        time.sleep(_GLANCE_SECONDS / 10)


def _name_holder(path: Path) -> None:
    facts = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(facts).encode() + b"\n", 0)
    finally:
        os.close(descriptor)
