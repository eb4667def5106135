"""Obstacles to the daemon's work: a second daemon, a full disk, runs that hang or fail."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import os
import re
import socket
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flowrl import notices, storage
from flowrl.errors import BusyError, ConfigError, classify_io_error, format_error
from flowrl.launchers.base import Handle
from flowrl.launchers.process import boot_id
from flowrl.parallel.shared_claim import SharedClaim, holder_of
from flowrl.paths import GraphPaths
from flowrl.runs import REPORT
from flowrl.storage import locks

logger = logging.getLogger(__name__)
PROBE_SECONDS = 5.0  # between probes of a full disk while nothing else happens
_LEAST_BYTES = 2**18
_NOTICE = "paused"

_LOCAL = """
aufs bcachefs btrfs ecryptfs erofs exfat ext2 ext3 ext4 f2fs fuse.fuse-overlayfs fuseblk hfsplus jfs
msdos nilfs2 ntfs ntfs3 overlay ramfs reiserfs rootfs tmpfs ubifs udf vfat xfs zfs
"""
_LOCAL_TYPES = frozenset(_LOCAL.split())  # other hosts may share any other file system
_MOUNTS = Path("/proc/self/mountinfo")
_RETRY_SECONDS = 0.1

_TAIL_BYTES = 2**14
_SHOWN_LINES = 10
_LINE_CHARACTERS = 300
SETTLE_SECONDS = 0.1
_REASON = re.compile(r"flowrl: |[A-Za-z_][\w.]*(Error|Exception|Interrupt)\b")  # of an end


class DaemonLock:
    """The lock that lets one daemon write in a graph's folder; its file is never deleted.

    The kernel frees it when its holder dies; the file names the holder. In a `shared` folder other
    hosts are kept out, too: by a claim, which is honoured in any folder that has one. None stands
    for shared if other hosts may share the disk.
    """

    def __init__(self, path: Path, *, shared: bool | None = False) -> None:
        self._path, self._shared = path, shared
        self._descriptor: int | None = None
        self._claim = SharedClaim(_claim_beside(path))

    def acquire(self) -> None:
        """Take the lock at once, or raise BusyError, which names the daemon that has it.

        ConfigError: other hosts may share its disk, and nobody said that the folder is shared.
        FileRefusedError: it is not a plain file.
        """
        if self._descriptor is not None:
            return
        storage.make_dir(self._path.parent)
        shared = self._shared or os.path.lexists(_claim_beside(self._path))
        if not shared and (network := _network_of(self._path.parent)):
            if self._shared is not None:
                raise ConfigError(
                    f"{self._path.parent} is on {network}, which other hosts may share, so two "
                    "daemons could both hold the lock; choose a --graph_path on a local disk, or "
                    "say --shared_folder"
                )
            shared = True
        if not os.path.lexists(self._path):
            storage.make_file(self._path)
        locks.check_plain(self._path)
        self._lock_file()
        if shared:
            try:
                self._claim.acquire()
            except BaseException:
                self.release()
                raise

    def _lock_file(self) -> None:
        """Lock the file, and write this process into it."""
        # Only to be read: what is open for writing would keep a disk from being made read-only.
        descriptor = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            with storage.naming(self._path):
                _lock(descriptor)
            since = datetime.now(UTC).isoformat(timespec="seconds")
            holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": since}
            self._path.write_text(json.dumps(holder) + "\n", encoding="utf-8")
        except OSError as error:
            if classify_io_error(error) == "disk":  # the lock is held, without a name
                self._descriptor = descriptor
                return
            os.close(descriptor)
            if not isinstance(error, BlockingIOError):
                raise
            raise BusyError(
                f"{self._path.parent} is in use by {in_words(_holder(self._path))}; stop it, or "
                "choose another folder"
            ) from error
        self._descriptor = descriptor

    def check(self) -> None:
        """Raise BusyError if the lock file was deleted or replaced; another daemon may have it."""
        if self._descriptor is None:
            return
        try:
            same = os.path.samestat(os.fstat(self._descriptor), self._path.lstat())
        except FileNotFoundError:
            same = False
        if not same:
            raise BusyError(
                f"{self._path} was deleted or replaced while this daemon held it, another one may "
                "have started; runs go on, start again to adopt them"
            )
        self._claim.check()

    def release(self) -> None:
        """Give the lock back."""
        self._claim.release()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def daemon_of(path: Path) -> dict[str, Any] | None:
    """Return `pid`, `host` and `since` of the daemon that holds the lock; None while none does.

    They are missing if they cannot be read. FileRefusedError: the lock is not a plain file.
    """
    locks.check_plain(path)
    return _holder(path) if locks.is_held(path) else holder_of(_claim_beside(path))


def _claim_beside(path: Path) -> Path:
    """Return the file of the claim that goes with a scheduler's lock."""
    return path.with_suffix(".claim")


def _network_of(folder: Path) -> str:
    """Return the type of a folder's file system if other hosts may share that, else ""."""
    device = folder.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = _MOUNTS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""  # without /proc the type is unknown
    kinds = {line.partition(" - ")[2].split()[0] for line in lines if line.split()[2] == number}
    return next(iter(kinds - _LOCAL_TYPES), "")


def _lock(descriptor: int) -> None:
    """Take the lock; `daemon_of` in another process holds it for an instant only."""
    until = time.monotonic() + _RETRY_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > until:
                raise
        time.sleep(_RETRY_SECONDS / 10)


def in_words(daemon: Mapping[str, Any]) -> str:
    """Return who a daemon is, for people."""
    if not daemon:
        return "another process"
    return f"process {daemon['pid']} on {daemon['host']} since {daemon['since']}"


def _holder(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_bytes()[:4096])
        return {"pid": int(data["pid"]), "host": str(data["host"]), "since": str(data["since"])}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


class DiskHealth:
    """The state of the graph's disk; while it cannot be written to, nothing starts or merges.

    The pause is reported in the log and, where that can be written, in `flowrl status`. It ends
    by itself: `probe` writes the state, and raises OSError while that cannot be done.
    """

    def __init__(self, graph_paths: GraphPaths, probe: Callable[[], object]) -> None:
        self._graph_paths = graph_paths
        self._probe = probe
        # "disk" or "io" while paused; at first, an earlier daemon may have left its notice.
        self._problem: str | None = None

    @property
    def ok(self) -> bool:
        """True if work may go on."""
        return not self._problem

    def report(self, error: BaseException) -> bool:
        """Check the folder if this may be the disk's fault; returns whether that may pass."""
        if passing := bool(classify_io_error(error)):
            self.check(doubtful=True)
        return passing

    def check(self, *, doubtful: bool = False) -> None:
        """Pause, or end a pause, by the file system's room and, if it is in doubt, by a probe."""
        problem = disk_shortage(self._graph_paths)
        if not problem and (doubtful or self._problem):
            try:
                self._probe()
            except OSError as error:
                problem = (classify_io_error(error) or "io"), format_error(error)
        if problem:
            self._pause(*problem)
        elif self._problem != "":
            self._go_on()

    def close(self) -> None:
        """End a pause with the daemon: nothing goes on by itself any more."""
        if self._problem:
            self._withdraw()

    def _pause(self, problem: str, why: str) -> None:
        if problem == self._problem:
            return
        self._problem = problem
        text = (
            f"paused ({problem}): {why}; nothing is started or merged until "
            f"{self._graph_paths.root} can be written, then it goes on by itself"
        )
        logger.error("%s", text)
        with contextlib.suppress(OSError):
            notices.publish(self._graph_paths, _NOTICE, text)

    def _go_on(self) -> None:
        if self._problem:
            logger.warning("%s can be written again: scheduling goes on", self._graph_paths.root)
        self._problem = ""
        self._withdraw()

    def _withdraw(self) -> None:
        try:
            notices.withdraw(self._graph_paths, _NOTICE)
        except OSError as error:
            logger.warning("a notice stays: %s", format_error(error))


def disk_shortage(graph_paths: GraphPaths) -> tuple[str, str] | None:
    """Return what is wrong with the folder's file system, "disk" or "io", and the reason."""
    try:
        file_system = os.statvfs(graph_paths.root)
    except OSError as error:
        return ("io", format_error(error)) if classify_io_error(error) else None
    if file_system.f_flag & os.ST_RDONLY:
        return "io", f"{graph_paths.root} is read-only"
    if file_system.f_blocks and file_system.f_bavail * file_system.f_frsize < _LEAST_BYTES:
        return "disk", f"{graph_paths.root} has no room left"
    return None


class RunLimits:
    """Limits of runs without progress, or too long, by clocks that nobody sets.

    `silent_seconds` is the longest time without a change of progress.json, `run_seconds` the
    longest life of an attempt's process (None: that of its job). Silence between two looks counts
    for `look_seconds` at most: in a longer time this process was frozen, and perhaps the run, too.
    """

    def __init__(
        self,
        *,
        silent_seconds: float,
        run_seconds: float | None,
        look_seconds: float = math.inf,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._silent_seconds = silent_seconds
        self._run_seconds = run_seconds
        self._look_seconds = look_seconds
        self._monotonic = monotonic
        # By run id: the stamp, the silence since, and when it was looked at.
        self._progress: dict[str, tuple[object, float, float]] = {}
        self._begun: dict[str, float] = {}  # runs on other hosts: when they were first seen to run

    def is_silent(self, run_id: str, progress: Path) -> bool:
        """Return whether the run has been silent for too long; only calls notice progress."""
        now, stamp = self._monotonic(), None
        with contextlib.suppress(OSError):
            status = progress.stat()
            stamp = (status.st_mtime_ns, status.st_size)
        known, silent, looked = self._progress.get(run_id, ((), 0.0, now))
        silent = silent + min(now - looked, self._look_seconds) if known == stamp else 0.0
        self._progress[run_id] = (stamp, silent, now)
        return silent > self._silent_seconds

    def seconds_left(self, handle: Handle, default: float = math.inf) -> float:
        """Return how much longer the run may take; below 0 when it is overdue."""
        most = default if self._run_seconds is None else self._run_seconds
        if not handle.engine:
            return most - age_seconds(handle.start_time)
        now = self._monotonic()
        return most - (now - self._begun.setdefault(handle.run_id, now))

    def forget(self, run_id: str) -> None:
        """Drop a run that has ended, or measure its silence from now on."""
        self._progress.pop(run_id, None)

    def forget_queued(self, run_id: str) -> None:
        """Measure silence and age of a run from now on, since it is in an engine's queue."""
        self.forget(run_id)
        self._begun.pop(run_id, None)


def age_seconds(start_time: str) -> float:
    """Return how long ago a process was born, by the kernel's clock; 0 when that is unknown."""
    boot, _, ticks = start_time.rpartition(":")
    if not ticks.isdigit() or boot != boot_id():
        return 0.0
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK"))


def read_log_tail(log: Path) -> tuple[str, ...]:
    """Return the last lines of an ended run's log, as a terminal would show them.

    They end with the reason, where there is one: libraries print notes and banners after it.
    Control sequences are left in: `redaction.cleaned` removes them from every event.
    """
    try:
        if log.is_symlink() or not log.is_file():
            return ()
        time.sleep(SETTLE_SECONDS)  # what copies the trainer's output ends after the trainer
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            rows = file.read(_TAIL_BYTES).decode(errors="replace").split("\n")
    except OSError:
        return ()
    shown = (row.rstrip("\r").rpartition("\r")[2].rstrip()[:_LINE_CHARACTERS] for row in rows)
    lines = [line for line in shown if line]
    last_report = max((n for n, line in enumerate(lines) if REPORT in line), default=-1)
    reasons = [n for n, line in enumerate(lines) if _REASON.match(line) and n > last_report]
    return tuple(lines[: reasons[-1] + 1 if reasons else None][-_SHOWN_LINES:])
