"""What a run's folder says about its life: spec, start, exit and lock, read and judged.

The files are the truth; tmux is never asked. Every function may be called at any time and by any
process.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl import storage
from flowrl.errors import EXIT_RESUMABLE, FileRefusedError, LaunchError
from flowrl.launchers import processes, spec
from flowrl.launchers.job import Exited, Finished, Handle, Job, Lost, Outcome, Why
from flowrl.paths import RunPaths
from flowrl.runs import read_result

FORMAT = 1
RUNNER = Path(__file__).with_name("start_runner.py")
CAPPED_LOG = Path(__file__).with_name("capped_log.py")
_EXIT_INTERRUPTED = 130
_CANNOT_LOOK = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.ESTALE)
_RUNNER_EXIT_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """start.json: who runs. The trainer has no pid while it is being started."""

    runner_pid: int
    runner_birth: str
    trainer_pid: int | None
    trainer_birth: str
    pane: str | None
    server_pid: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """exit.json: how the trainer ended, and what the runner was sent before.

    `asked_by` holds the signals' names and, after "hup", "server" if the tmux server ended.
    """

    code: int | None
    signal: int | None
    oom: bool
    asked_by: tuple[str, ...]
    detail: str


def prepare(job: Job, *, grace_seconds: float) -> None:
    """Write spec.json and take away what an earlier launch of this folder left behind.

    Raises:
      LaunchError: a process of this run lives, or the files cannot be written.
    """
    paths = _paths(job.folder)
    if not becomes_free(job.folder):
        raise LaunchError(f"{paths.lock} is held: a process of this run still lives; end it")
    try:
        for stale in (paths.exit_json, paths.start_json, paths.result_json):
            storage.remove_file(stale)
        spec.write(job, grace_seconds=grace_seconds)
    except OSError as error:
        raise LaunchError(f"{paths.spec_json} cannot be written: {error}") from error


def withdraw(job: Job) -> None:
    """Take spec.json back, so that a launch that was given up starts nothing if it comes late."""
    if not lock_held(job.folder):
        paths = _paths(job.folder)
        for left in (paths.spec_json, paths.secrets_json):
            storage.remove_file(left)
        spec.remove_log_pipe(paths)


def lock_held(folder: Path) -> bool:
    """Whether a process of this run lives: runner, trainer, or a child that inherited the lock."""
    try:
        descriptor = os.open(_paths(folder).lock, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
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
    """Whether nothing of the run lives: a runner that has recorded the end is still ending."""
    deadline = time.monotonic() + _RUNNER_EXIT_SECONDS
    while lock_held(folder):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def found(job: Job) -> Handle | None:
    """The handle of a run that was started in this folder before, whether it lives or not."""
    start = read_start(job.folder, job.run_id)
    if start is None:
        return None
    return Handle(
        run_id=job.run_id,
        session=job.name,
        pid=start.runner_pid,
        birth=start.runner_birth,
        pane=start.pane,
        server_pid=start.server_pid,
    )


def outcome(handle: Handle, folder: Path) -> Outcome | None:
    """How the run ended, or None while anything of it lives; orphans are ended here.

    Raises:
      OSError: it cannot be looked at now, for instance for lack of file descriptors.
    """
    found = _outcome(handle, folder)
    if found is not None:
        spec.forget_environment(_paths(folder))
    return found


def _outcome(handle: Handle, folder: Path) -> Outcome | None:
    ending = read_exit(folder, handle.run_id)
    if ending is not None:
        return judge(ending, handle, folder)
    if processes.alive(handle.pid, handle.birth):
        return None
    start = read_start(folder, handle.run_id)
    if runner_alive(handle, start, folder):
        return None
    if lock_held(folder):
        _end_orphans(start, folder)
        return None
    # The runner may have written it between our first look and its end.
    ending = read_exit(folder, handle.run_id)
    if ending is not None:
        return judge(ending, handle, folder)
    if processes.other_boot(handle.birth):
        return Exited(why=Why.SERVER_KILLED, detail="the machine was restarted")
    if start is None:
        return Lost("its runner ended before it started anything")
    return Lost("its runner was killed; nothing of the run lives")


def judge(ending: Ending, handle: Handle, folder: Path) -> Outcome:
    """What a recorded end means; success needs exit code 0 and a result of this very run."""
    refusal = ""
    if ending.code == 0:
        try:
            result = read_result(_paths(folder))
        except FileRefusedError as error:
            refusal = str(error)
        else:
            if result.run_id == handle.run_id:
                return Finished(result)
            refusal = f"result.json is of run {result.run_id}"
    why = _why(ending, handle)
    return Exited(
        why=why, code=ending.code, signal=ending.signal, detail=refusal or _detail(why, ending)
    )


def stop(folder: Path) -> None:
    """Ask the runner to end its trainer: TERM, then KILL after the spec's grace.

    The runner is found by its command line: its trainer can write any pid into start.json.
    """
    for pid in processes.with_last_words(str(_paths(folder).spec_json.absolute())):
        birth = processes.birth_of(pid)
        processes.send(pid, birth, signal.SIGTERM)
        processes.send(pid, birth, signal.SIGCONT)  # a stopped runner would never hear it


def runner_alive(handle: Handle, start: Start | None, folder: Path) -> bool:
    """Whether the runner lives, as the folder or, before it wrote there, the launcher knows it."""
    named = start is not None and processes.alive(start.runner_pid, start.runner_birth)
    if named and lock_held(folder):
        return True
    return processes.alive(handle.pid, handle.birth)


def read_start(folder: Path, run_id: str) -> Start | None:
    """start.json of this run; None when it is missing, of another run, or unreadable."""
    facts = _facts(_paths(folder).start_json, run_id)
    try:
        trainer = facts["trainer"] or {"pid": None, "birth": ""}
        return Start(
            runner_pid=int(facts["runner"]["pid"]),
            runner_birth=str(facts["runner"]["birth"]),
            trainer_pid=trainer["pid"],
            trainer_birth=str(trainer["birth"]),
            pane=facts["pane"],
            server_pid=facts["server_pid"],
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def read_exit(folder: Path, run_id: str) -> Ending | None:
    """exit.json of this run; None when it is missing, of another run, or unreadable."""
    facts = _facts(_paths(folder).exit_json, run_id)
    try:
        return Ending(
            code=None if facts["code"] is None else int(facts["code"]),
            signal=None if facts["signal"] is None else signal.Signals(facts["signal"]),
            oom=bool(facts["oom"]),
            asked_by=tuple(str(ask) for ask in facts["asked_by"]),
            detail=str(facts["detail"]),
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def _why(ending: Ending, handle: Handle) -> Why:
    if "term" in ending.asked_by:
        return Why.STOPPED
    if "hup" in ending.asked_by:
        return _why_hung_up(ending, handle)
    if ending.code == EXIT_RESUMABLE:
        return Why.STOPPED
    if ending.oom:
        return Why.OOM
    if ending.signal in (signal.SIGINT, signal.SIGQUIT) or ending.code == _EXIT_INTERRUPTED:
        return Why.INTERRUPTED
    if ending.signal is not None:
        return Why.SIGNAL
    if {"int", "quit"} & set(ending.asked_by):
        return Why.INTERRUPTED
    return Why.NO_RESULT if ending.code == 0 else Why.EXIT


def _why_hung_up(ending: Ending, handle: Handle) -> Why:
    """The runner has asked the server; where it could not, a user is taken to have meant it."""
    if handle.server_pid is None:
        return Why.STOPPED
    return Why.SERVER_KILLED if "server" in ending.asked_by else Why.SESSION_KILLED


def _detail(why: Why, ending: Ending) -> str:
    if ending.detail:
        return ending.detail
    if ending.signal is not None:
        how = f"killed by {signal.Signals(ending.signal).name}"
    else:
        how = f"exit code {ending.code}"
    match why:
        case Why.OOM:
            return "killed by the kernel for lack of memory"
        case Why.STOPPED:
            return f"stopped on request, {how}"
        case Why.INTERRUPTED:
            return "interrupted from its terminal"
        case Why.SESSION_KILLED:
            return "its tmux session was killed"
        case Why.SERVER_KILLED:
            return "its tmux server ended"
        case _:
            return how


def _end_orphans(start: Start | None, folder: Path) -> None:
    """Kill what lives without its runner: nobody would record how it ended.

    Without start.json of this run the lock's holder may be a runner that is just starting. Who
    holds the lock is known from the kernel: the trainer may write any pid into start.json.
    """
    if start is None:
        return
    for pid in processes.with_open_file(_paths(folder).lock):
        processes.send(pid, processes.birth_of(pid), signal.SIGKILL)


def _facts(path: Path, run_id: str) -> dict[str, Any]:
    try:
        facts = storage.read_json(path)
    except FileRefusedError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno in _CANNOT_LOOK:
            raise error.__cause__ from error
        return {}
    return facts if facts.get("format") == FORMAT and facts.get("run_id") == run_id else {}


def _paths(folder: Path) -> RunPaths:
    return RunPaths(folder, expert=0)  # none of the paths used here depends on the expert
