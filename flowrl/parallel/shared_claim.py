"""The claim of one scheduler on a graph's folder that several hosts share.

File locks do not reach across hosts everywhere; a name does: link(2) makes it once. Its holder
renews the claim every few seconds and takes it for lost itself before others may.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from threading import Event, Thread

from flowrl import storage
from flowrl.errors import BusyError, FileRefusedError
from flowrl.launchers import process
from flowrl.launchers.claims import BEAT_SECONDS, LOST_SECONDS
from flowrl.storage import records

logger = logging.getLogger(__name__)
_LOOK_SECONDS = 0.5
_REMEDY = "remove it once no scheduler is at work in this folder"


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The scheduler that has a claim."""

    pid: int
    host: str
    since: str
    start_time: str  # boot id and start time of the process
    namespace: str  # in which its pid holds

    @classmethod
    def this(cls) -> Holder:
        """Return this process."""
        since, pid = datetime.now(UTC).isoformat(timespec="seconds"), os.getpid()
        start_time, namespace = process.start_time_of(pid), process.namespace()
        host = socket.gethostname()
        return cls(pid=pid, host=host, since=since, start_time=start_time, namespace=namespace)

    @property
    def known_dead(self) -> bool:
        """True if this machine can tell, and the process is gone."""
        boot = self.start_time.rpartition(":")[0]
        here = (boot, self.namespace) == (process.boot_id(), process.namespace())
        return here and not process.alive(self.pid, self.start_time)


class SharedClaim:
    """A claim that no two schedulers hold, on whichever hosts they are."""

    def __init__(self, path: Path, *, lost_after: float = LOST_SECONDS) -> None:
        """Take the file; a holder that gives no beat for `lost_after` seconds has lost it."""
        self._path, self._lost_after = path, lost_after
        self._own: os.stat_result | None = None
        self._renewed_at = 0.0
        self._leaving = Event()

    def acquire(self) -> None:
        """Take the claim, from a holder who is known to be dead or gives no beat, too.

        BusyError: its holder lives. It takes some seconds to hear a beat of another host.
        """
        self._leaving.clear()
        while self._own is None:
            self._take()
        for left in self._path.parent.glob(f".{self._path.name}.*"):
            storage.remove_file(left)  # of one that was killed, or is about to be told of us
        Thread(target=self._beat, daemon=True, name="claim").start()

    def _take(self) -> None:
        """Try to make the claim; BusyError if its holder lives."""
        part = self._beside("part")
        try:
            records.write(part, Holder.this())
            os.link(part, self._path)
            self._own, self._renewed_at = self._path.lstat(), time.monotonic()
        except FileNotFoundError:  # another has just taken the claim, and cleared up ours
            if not self._path.parent.is_dir():
                raise
        except FileExistsError:
            self._take_from_the_dead()
        finally:
            storage.remove_file(part)

    def _beside(self, what: str) -> Path:
        """Return a name beside the claim that no other process has: pids are not enough."""
        return self._path.with_name(f".{self._path.name}.{secrets.token_hex(4)}.{what}")

    def check(self) -> None:
        """Raise BusyError if the claim is lost: another scheduler may have it."""
        if self._own is None:
            return
        own = self._is_own()  # on a disk that hangs it takes its time
        silent = time.monotonic() - self._renewed_at
        if not own or silent > self._lost_after / 2:
            raise BusyError(
                f"{self._path} was taken by another scheduler, or this one could not renew it for "
                f"{silent:.0f} s; runs go on, start again to adopt them"
            )

    def release(self) -> None:
        """Give the claim back; on a disk that is away it stays, until others find it silent."""
        self._leaving.set()
        with suppress(OSError):
            if self._is_own():
                storage.remove_file(self._path)
        self._own = None

    def _is_own(self) -> bool:
        with suppress(FileNotFoundError):
            return self._own is not None and os.path.samestat(self._own, self._path.lstat())
        return False

    def _beat(self) -> None:
        while not self._leaving.wait(BEAT_SECONDS):
            with suppress(OSError):  # the disk is away: `check` says so in time
                now = time.monotonic()
                if now - self._renewed_at > self._lost_after:
                    return  # others may have taken it, and a file's number is given again
                if self._is_own():
                    os.utime(self._path)
                    self._renewed_at = now

    def _take_from_the_dead(self) -> None:
        """Remove the claim of a dead holder, or raise BusyError once a beat of it is heard."""
        began, first = time.monotonic(), None
        while True:
            try:
                holder, seen = records.read(self._path, Holder, remedy=_REMEDY), self._path.lstat()
            except FileRefusedError:
                if not os.path.lexists(self._path):
                    return None  # given back meanwhile
                raise
            first = first or seen
            if seen.st_mtime_ns != first.st_mtime_ns or not os.path.samestat(seen, first):
                raise BusyError(
                    f"{self._path.parent} is in use by process {holder.pid} on {holder.host} since "
                    f"{holder.since}; stop it, or choose another folder"
                )
            silent = time.monotonic() - began
            if holder.known_dead or silent > self._lost_after:
                return self._remove(first)
            if silent < _LOOK_SECONDS:
                logger.warning(
                    "the scheduler on %s has this folder; waiting up to %.0f s for a sign of life",
                    *(holder.host, self._lost_after),
                )
            time.sleep(_LOOK_SECONDS)

    def _remove(self, dead: os.stat_result) -> None:
        """Move a dead claim away; a new one that came meanwhile is put back."""
        moved = self._beside("dead")
        with suppress(FileNotFoundError):
            os.rename(self._path, moved)  # noqa: PTH104 — storage would flush it
            if not os.path.samestat(dead, moved.lstat()):
                with suppress(FileExistsError):
                    os.link(moved, self._path)
            storage.remove_file(moved)


def holder_of(path: Path) -> dict[str, object] | None:
    """Return `pid`, `host` and `since` of a claim's holder; None without one that may live."""
    with suppress(FileRefusedError, ValueError):
        if os.path.lexists(path):
            holder = records.read(path, Holder)
            facts = {"pid": holder.pid, "host": holder.host, "since": holder.since}
            return None if holder.known_dead else facts
    return None
