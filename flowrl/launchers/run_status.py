"""What a job's folder says about its life: the spec, start and exit records and the lock.

The files are the truth; tmux is never asked. Every function may be called at any time and by any
process.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl import storage
from flowrl.errors import EXIT_RESUMABLE, FileRefusedError, LaunchError
from flowrl.launchers import process
from flowrl.launchers.base import ExitCause, Exited, Finished, Handle, Job, Lost, Outcome
from flowrl.paths import JobPaths
from flowrl.redaction import secrets_of

FORMAT = 1
RUNNER = Path(__file__).with_name("runner.py")
LOG_WRITER = Path(__file__).with_name("log_writer.py")
GRACE_SECONDS = 30.0
_EXIT_INTERRUPTED = 130
_CANNOT_LOOK = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.ESTALE)
_RUNNER_EXIT_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRecord:
    """start.json: which processes run. The job has no pid while it is being started."""

    runner_pid: int
    runner_start_time: str
    job_pid: int | None
    job_start_time: str
    pane: str | None
    server_pid: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitRecord:
    """exit.json: how the job ended, and the names of the signals the runner received before.

    After "SIGHUP", `received` holds "server ended" if the whole tmux server did.
    """

    code: int | None
    signal: signal.Signals | None
    oom: bool
    received: tuple[str, ...]
    detail: str


def prepare(job: Job, *, grace_seconds: float) -> None:
    """Write what the runner and the log's writer read, and remove what an earlier launch left.

    The environment and the secrets are in files of their own, which their readers remove at once.

    Raises:
      LaunchError: a process of this run lives, or the files cannot be written.
    """
    paths = JobPaths(job.folder)
    if not becomes_free(job.folder):
        raise LaunchError(f"{paths.lock} is held: a process of this run still lives; end it")
    results = [job.folder / name for name in job.results]
    secrets = secrets_of(job.env, job.passed)
    spec = {
        "format": FORMAT,
        "run_id": job.run_id,
        "argv": list(job.argv),
        "cwd": str(job.cwd),
        "grace_seconds": grace_seconds,
        "cpus": list(job.cpus),
        "sandbox": list(job.sandbox),
    }
    environment = {"format": FORMAT, "environment": dict(job.env)}
    try:
        for stale in (paths.exit_json, paths.start_json, paths.secrets_json, *results):
            storage.remove_file(stale)
        _begin_log(job.folder / job.log)
        if secrets:
            storage.write_json(paths.secrets_json, {"format": FORMAT, "secrets": secrets})
        # A power cut that takes one of these takes the runner, too: the next launch writes them.
        storage.write_json(paths.environment_json, environment, durable=False)
        storage.write_json(paths.spec_json, spec, durable=False)
    except OSError as error:
        raise LaunchError(f"{paths.spec_json} cannot be written: {error}") from error


def withdraw(job: Job) -> None:
    """Remove spec.json, so that a launch that was given up starts nothing if it comes late."""
    if not lock_held(job.folder):
        storage.remove_file(JobPaths(job.folder).spec_json)
        _forget_secrets(JobPaths(job.folder))


def lock_held(folder: Path) -> bool:
    """Whether a process of this run lives: runner, job, or a child that inherited the lock."""
    try:
        descriptor = os.open(JobPaths(folder).lock, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def becomes_free(folder: Path) -> bool:
    """Whether no process of the run lives; waits a second for a runner that is just exiting."""
    deadline = time.monotonic() + _RUNNER_EXIT_SECONDS
    while lock_held(folder):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def find(job: Job) -> Handle | None:
    """The handle of a run that was started in this folder before, whether it lives or not."""
    start = read_start(job.folder, job.run_id)
    if start is None:
        return None
    return Handle(
        run_id=job.run_id,
        session=job.name,
        pid=start.runner_pid,
        start_time=start.runner_start_time,
        pane=start.pane,
        server_pid=start.server_pid,
    )


def find_living(job: Job) -> Handle | None:
    """As `find`, but only a run that lives."""
    handle = find(job)
    return handle if handle is not None and outcome(handle, job.folder) is None else None


def outcome(handle: Handle, folder: Path) -> Outcome | None:
    """How the run ended, or None while a process of it lives; orphans are ended here.

    Raises:
      OSError: it cannot be looked at now, for instance for lack of file descriptors.
    """
    found = _outcome(handle, folder)
    if found is not None:
        _forget_secrets(JobPaths(folder))
        storage.remove_part_files(folder)  # of a runner that was killed
    return found


def _outcome(handle: Handle, folder: Path) -> Outcome | None:
    record = read_exit(folder, handle.run_id)
    if record is not None:
        return outcome_of(record, handle, folder)
    if process.alive(handle.pid, handle.start_time):
        return None
    start = read_start(folder, handle.run_id)
    if _runner_alive(start, folder):
        return None
    if lock_held(folder):
        _end_orphans(start, folder)
        return None
    # The runner may have written it between the first look and its end.
    record = read_exit(folder, handle.run_id)
    if record is not None:
        return outcome_of(record, handle, folder)
    if process.is_of_other_boot(handle.start_time):
        return Exited(cause=ExitCause.SERVER_KILLED, detail="the machine was restarted")
    if start is None:
        return Lost("its runner ended before it started anything")
    return Lost("its runner was killed; no process of the run lives")


def outcome_of(record: ExitRecord, handle: Handle, folder: Path) -> Finished | Exited:
    """What a recorded end means."""
    cause = _cause(record, handle)
    if cause is None:
        return Finished(folder)
    detail = record.detail or _detail(cause, record)
    return Exited(cause=cause, code=record.code, signal=record.signal, detail=detail)


def request_stop(folder: Path) -> None:
    """Ask the runner to end its job: TERM, then KILL after the spec's grace period.

    The runner is found by its command line: its job can write any pid into start.json.
    """
    for pid in process.with_last_argument(str(JobPaths(folder).spec_json.absolute())):
        start_time = process.start_time_of(pid)
        process.send(pid, start_time, signal.SIGTERM)
        process.send(pid, start_time, signal.SIGCONT)  # a stopped runner would never notice


def read_start(folder: Path, run_id: str) -> StartRecord | None:
    """start.json of this run; None when it is missing, of another run, or unreadable."""
    facts = _record(JobPaths(folder).start_json, run_id)
    try:
        job = facts["job"] or {"pid": None, "start_time": ""}
        return StartRecord(
            runner_pid=int(facts["runner"]["pid"]),
            runner_start_time=str(facts["runner"]["start_time"]),
            job_pid=job["pid"],
            job_start_time=str(job["start_time"]),
            pane=facts["pane"],
            server_pid=facts["server_pid"],
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def read_exit(folder: Path, run_id: str) -> ExitRecord | None:
    """exit.json of this run; None when it is missing, of another run, or unreadable."""
    facts = _record(JobPaths(folder).exit_json, run_id)
    try:
        return ExitRecord(
            code=None if facts["code"] is None else int(facts["code"]),
            signal=None if facts["signal"] is None else signal.Signals(facts["signal"]),
            oom=bool(facts["oom"]),
            received=tuple(str(name) for name in facts["received"]),
            detail=str(facts["detail"]),
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def _runner_alive(start: StartRecord | None, folder: Path) -> bool:
    if start is None or not process.alive(start.runner_pid, start.runner_start_time):
        return False
    return lock_held(folder)


def _cause(record: ExitRecord, handle: Handle) -> ExitCause | None:
    """Why the job did not finish; None when it did."""
    if record.code == 0 and not record.received:
        return None
    if "SIGTERM" in record.received:
        return ExitCause.STOPPED
    if "SIGHUP" in record.received:
        return _cause_of_hangup(record, handle)
    if record.code == EXIT_RESUMABLE:
        return ExitCause.STOPPED
    return ExitCause.OOM if record.oom else _own_cause(record)


def _own_cause(record: ExitRecord) -> ExitCause:
    """Why a job ended that nothing outside had asked to end, but perhaps its terminal."""
    typed = (signal.SIGINT, signal.SIGQUIT)
    if record.signal in typed or record.code == _EXIT_INTERRUPTED:
        return ExitCause.INTERRUPTED
    if record.signal is not None:
        return ExitCause.SIGNAL
    interrupted = any(number.name in record.received for number in typed)
    return ExitCause.INTERRUPTED if interrupted else ExitCause.EXIT


def _cause_of_hangup(record: ExitRecord, handle: Handle) -> ExitCause:
    """The runner has asked the server; where it could not, we assume that a user meant it."""
    if handle.server_pid is None:
        return ExitCause.STOPPED
    ended = "server ended" in record.received
    return ExitCause.SERVER_KILLED if ended else ExitCause.SESSION_KILLED


def _detail(cause: ExitCause, record: ExitRecord) -> str:
    if record.signal is not None:
        how = f"killed by {record.signal.name}"
    else:
        how = f"exit code {record.code}"
    details = {
        ExitCause.OOM: "killed by the kernel for lack of memory",
        ExitCause.STOPPED: f"stopped on request, {how}",
        ExitCause.INTERRUPTED: "interrupted from its terminal",
        ExitCause.SESSION_KILLED: "its tmux session was killed",
        ExitCause.SERVER_KILLED: "its tmux server ended",
    }
    return details.get(cause, how)


def _end_orphans(start: StartRecord | None, folder: Path) -> None:
    """Kill what lives without its runner: nothing would record how it ended.

    Without start.json of this run the lock's holder may be a runner that is just starting. The
    kernel names the holders of the lock; the job may write any pid into start.json.
    """
    if start is None:
        return
    for pid in process.with_open_file(JobPaths(folder).lock):
        process.send(pid, process.start_time_of(pid), signal.SIGKILL)


def _forget_secrets(paths: JobPaths) -> None:
    """Remove the files with secrets, which their readers have removed already if they could."""
    for path in (paths.secrets_json, paths.environment_json):
        with suppress(IsADirectoryError):  # the job's own
            storage.remove_file(path)


def _begin_log(path: Path) -> None:
    """Make the log, for readers that follow it; one that is no plain file is removed."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        storage.remove_file(path)
    storage.make_file(path)


def _record(path: Path, run_id: str) -> dict[str, Any]:
    try:
        facts = storage.read_json(path)
    except FileRefusedError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno in _CANNOT_LOOK:
            raise error.__cause__ from error
        return {}
    return facts if facts.get("format") == FORMAT and facts.get("run_id") == run_id else {}
