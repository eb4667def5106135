"""Files in a job's folder that tell its life: spec, start and exit records, lock.

The files are the truth; tmux is never asked. Every function may be called at any time and by any
process.
"""

from __future__ import annotations

import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from signal import Signals
from typing import Annotated, Any, TypeVar

from flowrl import storage
from flowrl.errors import EXIT_INTERRUPTED, EXIT_RESUMABLE, FileRefusedError, LaunchError
from flowrl.launchers import claims, process
from flowrl.launchers.base import ExitCause, Exited, Finished, Handle, Job, Lost, Outcome
from flowrl.paths import JobPaths
from flowrl.redaction import secrets_of
from flowrl.storage import locks, records

_FORMAT = 1
RUNNER = Path(__file__).with_name("runner.py")
LOG_WRITER = Path(__file__).with_name("log_writer.py")
RUNNER_EXIT_SECONDS = 1.0
Pid = Annotated[int, records.within(1, 2**22)]  # a job may write anything into start.json


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRecord:
    """start.json: which processes run. The job has no pid while it is being started."""

    run_id: str
    runner_pid: Pid
    runner_start_time: str
    job_pid: Pid | None
    job_start_time: str
    pane: str | None
    server_pid: Pid | None
    started_at: float
    launch: str | None = None  # of a run that an engine has started
    host: str = ""
    namespace: str = ""  # in which these pids hold

    @property
    def is_here(self) -> bool:
        """True if these pids are of this machine and hold here."""
        boot = self.runner_start_time.rpartition(":")[0]
        return boot == process.boot_id() and self.namespace in ("", process.namespace())


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitRecord:
    """exit.json: how the job ended, and the names of the signals the runner received before.

    After "SIGHUP", `received` holds "server ended" if the whole tmux server did.
    """

    run_id: str
    code: int | None
    signal: Annotated[int, Signals] | None
    oom: bool
    received: tuple[str, ...]
    detail: str
    ended_at: float
    launch: str | None = None  # of a run that an engine has started


_Record = TypeVar("_Record", StartRecord, ExitRecord)


def prepare(job: Job, *, grace_seconds: float, **lease: Any) -> None:
    """Write what the runner and the log's writer read, and remove what an earlier launch left.

    The environment and the secrets are in files of their own, which their readers remove at once.
    A job for an engine has a `lease`: its `launch` and the seconds after which it counts as lost.
    Raises LaunchError if a process of this run lives, or the files cannot be written.
    """
    paths = JobPaths(job.folder)
    if not becomes_free(job.folder):
        raise LaunchError(f"{paths.lock} is held: a process of this run still lives; end it")
    results = [job.folder / name for name in job.results]
    secrets = secrets_of(job.env, job.passed)
    spec = {
        "format": _FORMAT,
        "run_id": job.run_id,
        "argv": list(job.argv),
        "cwd": str(job.cwd),
        "grace_seconds": grace_seconds,
        "cpus": list(job.cpus),
        "sandbox": list(job.sandbox),
        "limits": dict(job.limits),
        **lease,
    }
    environment = {"format": _FORMAT, "environment": dict(job.env)}
    try:
        for stale in (paths.exit_json, paths.start_json, paths.secrets_json, *results):
            storage.remove_file(stale)
        log = job.folder / job.log
        if log.is_symlink() or not log.is_file():
            storage.remove_file(log)
        storage.make_file(log)  # for readers that follow it
        if secrets:
            storage.write_json(paths.secrets_json, {"format": _FORMAT, "secrets": secrets})
        # A power cut that takes one of these takes the runner, too: the next launch writes them.
        storage.write_json(paths.environment_json, environment, durable=False)
        storage.write_json(paths.spec_json, spec, durable=False)
    except OSError as error:
        raise LaunchError(f"{paths.spec_json} cannot be written: {error}") from error


def runner_words(job: Job) -> tuple[str, ...]:
    """Return the command line of a job's runner, on this machine."""
    claim = claims.claim_of(job.folder, job.run_id)
    return (sys.executable, "-I", "-S", str(RUNNER), *_runner_arguments(job.folder, claim))


def _runner_arguments(folder: Path, claim: claims.Claim | None) -> tuple[str, ...]:
    spec_json = str(JobPaths(folder).spec_json.absolute())
    return (spec_json, claim.launch) if claim else (spec_json,)


def log_words(job: Job) -> tuple[str, ...]:
    """Return the command line of the writer of a job's log."""
    return (sys.executable, "-I", "-S", str(LOG_WRITER), str((job.folder / job.log).absolute()))


def withdraw(job: Job) -> None:
    """Remove spec.json, so that a launch that was given up starts nothing if it comes late."""
    if not lock_held(job.folder):
        storage.remove_file(JobPaths(job.folder).spec_json)
        forget_secrets(JobPaths(job.folder))


def lock_held(folder: Path) -> bool:
    """Return whether a process of this run lives: runner, job, or a child that has the lock.

    One that an engine may have on another host counts as alive.
    """
    return claims.is_claimed(folder) or locks.is_held(JobPaths(folder).lock)


def becomes_free(folder: Path) -> bool:
    """Return whether no process of the run lives; waits a second for a runner that is exiting."""
    deadline = time.monotonic() + RUNNER_EXIT_SECONDS
    while lock_held(folder):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def outcome(handle: Handle, folder: Path) -> Outcome | None:
    """Return the outcome, or None while a process of the job lives; orphans are ended here."""
    result = _outcome(handle, folder)
    if result is not None:
        forget_secrets(JobPaths(folder))
        storage.remove_part_files(folder)  # of a runner that was killed
    return result


def _outcome(handle: Handle, folder: Path) -> Outcome | None:
    alive = process.alive(handle.pid, handle.start_time)
    start = read_start(folder, handle.run_id)
    if lock_held(folder):  # whatever the job has written into exit.json
        runner = start is not None and process.alive(start.runner_pid, start.runner_start_time)
        here = start is None or start.namespace in ("", process.namespace())
        if not alive and not runner and here:
            _end_orphans(folder)
        return None
    lock = JobPaths(folder).lock
    # Just about to end, or its job has freed the lock; else the folder is a copy of the run's.
    if alive and (start is None or process.with_open_file(lock)):
        return None
    if record := read_exit(folder, handle.run_id):
        return recorded_end(record, handle, folder)
    if handle.start_time and handle.start_time.rpartition(":")[0] != process.boot_id():
        return Exited(cause=ExitCause.SERVER_KILLED, detail="the machine was restarted")
    if start is None:
        return Lost("its runner ended before it started anything")
    return Lost("its runner was killed; no process of the run lives")


def _end_orphans(folder: Path) -> None:
    """Kill the processes of a run whose runner is gone: nothing would record how they ended.

    The kernel names the lock's holders; the job may write any pid into start.json.
    """
    for pid in process.with_open_file(JobPaths(folder).lock):
        process.send(pid, process.start_time_of(pid), signal.SIGKILL)


def request_stop(folder: Path) -> None:
    """Ask the runner to end its job: TERM, then KILL after the spec's grace period.

    The runner is found by its command line: its job can write any pid into start.json. One on
    another host reads it in its claim.
    """
    claim = claims.ask_to_end(folder)
    for pid in process.of_script(RUNNER, *_runner_arguments(folder, claim)):
        start_time = process.start_time_of(pid)
        process.send(pid, start_time, signal.SIGTERM)
        process.send(pid, start_time, signal.SIGCONT)  # a stopped runner would never notice


def read_start(folder: Path, run_id: str) -> StartRecord | None:
    """start.json of this run; None when it is missing, of another run, or unreadable."""
    return _of_run(JobPaths(folder).start_json, StartRecord, run_id)


def read_exit(folder: Path, run_id: str) -> ExitRecord | None:
    """exit.json of this run; None when it is missing, of another run, or unreadable."""
    return _of_run(JobPaths(folder).exit_json, ExitRecord, run_id)


def _of_run(path: Path, kind: type[_Record], run_id: str) -> _Record | None:
    with suppress(FileRefusedError):
        record = records.read(path, kind, sealed=False)
        return record if record.run_id == run_id else None
    return None


def recorded_end(record: ExitRecord, handle: Handle, folder: Path) -> Finished | Exited:
    """Return the outcome by the first row that holds."""
    received, typed = set(record.received), {"SIGINT", "SIGQUIT"}
    killer = Signals(record.signal).name if record.signal is not None else ""
    how = f"killed by {killer}" if killer else f"exit code {record.code}"
    stopped, typing = f"stopped on request, {how}", "interrupted from its terminal"
    hangup = "SIGHUP" in received
    rows = [
        (record.code == 0 and not received, None, ""),
        ("SIGTERM" in received, ExitCause.STOPPED, stopped),
        (hangup and handle.server_pid is None, ExitCause.STOPPED, stopped),
        (hangup and "server ended" in received, ExitCause.SERVER_KILLED, "its tmux server ended"),
        (hangup, ExitCause.SESSION_KILLED, "its tmux session was killed"),
        (record.code == EXIT_RESUMABLE, ExitCause.STOPPED, stopped),
        (record.oom, ExitCause.OOM, "killed by the kernel for lack of memory"),
        (killer in typed or record.code == EXIT_INTERRUPTED, ExitCause.INTERRUPTED, typing),
        (killer, ExitCause.SIGNAL, how),
        (received & typed, ExitCause.INTERRUPTED, typing),
        (True, ExitCause.EXIT, how),
    ]
    cause, words = next((cause, words) for holds, cause, words in rows if holds)
    if cause is None:
        return Finished(folder)
    words = record.detail or words
    return Exited(cause=cause, code=record.code, signal=record.signal, detail=words)


def forget_secrets(paths: JobPaths) -> None:
    """Remove the files with secrets, which their readers have removed already if they could."""
    for path in (paths.secrets_json, paths.environment_json):
        with suppress(IsADirectoryError):  # the job's own
            storage.remove_file(path)
