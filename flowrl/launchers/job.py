"""What a launcher is asked to run, what it answers, and how a run can end."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from flowrl.runs import RunResult

MODULE_WORDS = 3  # of an argv `python -m MODULE …`


class Why(StrEnum):
    """Why a run ended without a result."""

    EXIT = "exit"  # the trainer ended with a code other than 0
    SIGNAL = "signal"  # the trainer was killed by a signal
    OOM = "oom"  # killed by the kernel for lack of memory
    NO_RESULT = "no_result"  # exit code 0, but no valid result.json of this attempt
    STOPPED = "stopped"  # our own stop or a shutdown; the run is resumable
    INTERRUPTED = "interrupted"  # a user typed Ctrl-C in the pane
    SESSION_KILLED = "session_killed"  # a user killed the session
    SERVER_KILLED = "server_killed"  # the tmux server or the machine went down


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One process to run; `env` is its complete environment."""

    name: str  # the session's name
    run_id: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: Path
    folder: Path  # the run folder: spec, start, exit, lock and log are written here
    cpus: tuple[int, ...] = ()  # the CPUs it may use; () means all
    sandbox: tuple[str, ...] = ()  # what confines it, words to go before argv; () does not
    passed: tuple[str, ...] = ()  # names of variables in `env` whose values must not be logged


@dataclass(frozen=True, slots=True, kw_only=True)
class Handle:
    """A launched run, as it is kept in scheduler_state.json."""

    run_id: str
    session: str
    pid: int  # the runner process
    birth: str = ""  # boot id and start time of that process: a reused pid is not ours
    pane: str | None = None
    server_pid: int | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """The run ended with code 0 and a valid result of this attempt."""

    result: RunResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Exited:
    """The run ended without a result."""

    why: Why
    code: int | None = None
    signal: int | None = None
    detail: str = ""  # one line for people


@dataclass(frozen=True, slots=True)
class Lost:
    """The run left no trace of how it ended, and nothing of it lives."""

    detail: str = ""


Outcome = Finished | Exited | Lost


class Launcher(Protocol):
    """Starts runs and hears of their ends; every call is idempotent by run id."""

    def launch(self, job: Job) -> Handle:
        """Start a run; one that lives already is adopted, one that ended is started anew.

        Raises:
          LaunchError: it could not be started; nothing of it lives.
        """
        ...

    def find(self, job: Job) -> Handle | None:
        """A run that was launched before, e.g. by an earlier daemon; `poll` tells its end.

        None means that it never started, or left no trace: launch it.
        """
        ...

    def poll(self, handle: Handle, folder: Path) -> Outcome | None:
        """How the run ended, or None while it lives."""
        ...

    def cancel(self, handle: Handle, folder: Path) -> None:
        """Ask the run to end: TERM, then KILL after a grace; returns at once."""
        ...

    def wait(self, handles: Collection[Handle], *, timeout_seconds: float) -> None:
        """Return as soon as one of the runs may have ended, or after the timeout."""
        ...

    def close(self) -> None:
        """Release what the launcher holds in this process; runs go on."""
        ...
