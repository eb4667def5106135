"""Jobs and outcomes of launchers; values alone, since state files and every test hold them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from flowrl.storage.records import Natural


class ExitCause(StrEnum):
    """The cause for which a job did not finish."""

    EXIT = "exit"  # it ended with a code other than 0
    SIGNAL = "signal"  # a signal killed it
    OOM = "oom"  # the kernel killed it for lack of memory
    NO_RESULT = "no_result"  # it ended with code 0, but its caller found no valid result
    STOPPED = "stopped"  # our own stop or a shutdown; the run is resumable
    INTERRUPTED = "interrupted"  # a user typed Ctrl-C in the pane
    SESSION_KILLED = "session_killed"  # a user killed the session
    SERVER_KILLED = "server_killed"  # the tmux server, the node or the machine went down


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One process to run; `env` is its complete environment."""

    name: str  # the session's name
    run_id: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: Path
    folder: Path  # where spec, start, exit, lock and log are written
    log: str = "training.log"  # the file in the folder that takes its output
    results: tuple[str, ...] = ()  # files in the folder that a launch removes before the job starts
    cpus: tuple[int, ...] = ()  # the CPUs it may use; () means all
    sandbox: tuple[str, ...] = ()  # words put before argv to confine the job; () for none
    limit_seconds: float = math.inf  # its caller ends one that takes longer
    limits: Mapping[str, int] = field(default_factory=dict)  # run_memory and others, by flag
    passed: tuple[str, ...] = ()  # names of variables in `env` whose values must not be logged
    num_cpus: int = 0  # what an engine is asked for; 0 leaves it to the engine
    num_nodes: int = 1  # of the engine's hosts, the first of which starts the job
    engine_words: tuple[str, ...] = ()  # and for what else, such as "partition=gpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Handle:
    """A launched job, as it is kept in scheduler_state.json."""

    run_id: str
    session: str
    pid: Natural  # the runner process; 0 on another host
    start_time: str = ""  # boot id and start time of that process: a reused pid has another
    pane: str | None = None
    server_pid: Natural | None = None
    engine: str = ""  # what runs it: "slurm", "ray"; "" is this machine
    engine_id: str = ""  # by which the engine knows it


@dataclass(frozen=True, slots=True)
class Finished:
    """The job ended with code 0; the caller reads its results in the folder."""

    folder: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Exited:
    """The job ended otherwise."""

    cause: ExitCause
    code: int | None = None
    signal: int | None = None
    detail: str = ""  # one line for people


@dataclass(frozen=True, slots=True)
class Lost:
    """The job left no record of how it ended, and no process of it lives."""

    detail: str = ""


Outcome = Finished | Exited | Lost
