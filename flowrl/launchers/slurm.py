"""The launcher of Slurm, a leaf: `sbatch` starts each run's runner, and files say how it ended.

Jobs are known by their comment, never by their id alone: a controller that was killed gives ids
twice. Seen with Slurm 22.05: calls take 9 s to fail while the controller is down.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from flowrl.errors import ConfigError, LaunchError
from flowrl.launchers import child
from flowrl.launchers.base import ExitCause, Job
from flowrl.launchers.remote import EngineJob, EngineLauncher, UnansweredError, runner_line

_CALL_SECONDS = 15.0
_SAVE_SECONDS = 60  # before a time limit, for a checkpoint
_NAMES = """
account constraint cpus-per-gpu cpus-per-task exclude exclusive gpus gpus-per-node gpus-per-task
gres hint licenses mem mem-per-cpu mem-per-gpu nice nodelist partition prefer priority qos
reservation threads-per-core time time-min tmp
"""
_OPTIONS = frozenset(_NAMES.split())
_VALUE = re.compile(r"[\w.,:=+*/@%&|!()\[\]-]*", re.ASCII)
_ENVIRONMENT = re.compile(r"PATH|HOME|USER|LOGNAME|SHELL|LANG|TZ|SLURM_CONF|SBATCH_\w+")
_QUEUED = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED"})
_LIVE = _QUEUED | {
    *("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"),
    *("SPECIAL_EXIT", "RESV_DEL_HOLD"),
}
_NO_RECORD = "it left no record"
_ENDS = {  # of jobs that could leave none
    "CANCELLED": (ExitCause.SESSION_KILLED, "it was cancelled in Slurm"),
    "OUT_OF_MEMORY": (ExitCause.OOM, "Slurm ended it for lack of memory"),
    "TIMEOUT": (ExitCause.SERVER_KILLED, "Slurm's time limit was reached"),
    "PREEMPTED": (ExitCause.SERVER_KILLED, "Slurm gave its place to another job"),
    "NODE_FAIL": (ExitCause.SERVER_KILLED, "its node failed"),
    "BOOT_FAIL": (ExitCause.SERVER_KILLED, "its node did not start"),
    "REVOKED": (ExitCause.SERVER_KILLED, _NO_RECORD),
}


def checked_options(words: Sequence[str]) -> tuple[str, ...]:
    """Return words NAME or NAME=VALUE as options of sbatch; ConfigError for what is no resource.

    >>> checked_options(["partition=gpu", "exclusive"])
    ('--partition=gpu', '--exclusive')
    """
    for word in words:
        name, _, value = word.partition("=")
        if name not in _OPTIONS:
            known = ", ".join(sorted(_OPTIONS))
            raise ConfigError(
                f"--slurm_args {word!r:.80}: give NAME=VALUE without dashes, where NAME is one of "
                f"sbatch's {known}"
            )
        if not _VALUE.fullmatch(value):
            raise ConfigError(
                f"--slurm_args {word!r:.80}: a value has letters, digits and punctuation alone, "
                "no spaces, quotes or semicolons"
            )
    return tuple(f"--{word}" for word in words)


class SlurmLauncher(EngineLauncher):
    """The Launcher with a Slurm cluster; the runner is all that a job starts."""

    engine = "slurm"

    def __init__(self, options: Sequence[str] = (), **seconds: float) -> None:
        """Take words such as "partition=gpu" for every job; ConfigError."""
        super().__init__(**seconds)
        self._options = checked_options(options)

    def check(self) -> None:
        """Raise ConfigError if Slurm is missing, does not answer or refuses such jobs."""
        if shutil.which("sbatch") is None:
            raise ConfigError("--launcher slurm: sbatch is missing; start flowrl on a login node")
        try:
            done = _call("sbatch", "--test-only", *self._options, script="exit 0")
        except UnansweredError as error:
            raise ConfigError(f"--launcher slurm: {error}; see sinfo, then start again") from error
        if done.returncode:
            flag = "--slurm_args" if self._options else "--launcher slurm"
            why = f"Slurm refuses such jobs: {child.reason(done)}"
            raise ConfigError(f"{flag}: {why}; start again once sbatch --test-only takes one")

    def submit(self, job: Job, launch: str) -> str:
        """Submit the runner, with the log's writer at its output."""
        done = _call(
            *("sbatch", "--parsable", f"--job-name={job.name}", f"--comment={launch}"),
            *("--output=/dev/null", "--no-requeue"),
            *(f"--nodes={job.num_nodes}", f"--ntasks={job.num_nodes}", "--ntasks-per-node=1"),
            *(f"--chdir={job.folder.absolute()}", f"--signal=B:TERM@{_SAVE_SECONDS}"),
            *([f"--cpus-per-task={job.num_cpus}"] if job.num_cpus else []),
            *(checked_options(job.engine_words) or self._options),
            script=runner_line(job),
        )
        if done.returncode:
            raise LaunchError(f"Slurm refuses {job.name}: {child.reason(done)}")
        return done.stdout.strip().partition(";")[0]

    def list_jobs(self) -> Mapping[str, EngineJob]:
        """Ask squeue for all jobs of this user that it still knows."""
        done = _call("squeue", "--me", "--noheader", "--states=all", "--format=%i|%k|%T|%N|%r")
        if done.returncode:
            raise UnansweredError(f"squeue fails: {child.reason(done)}")
        rows = (line.split("|", 4) for line in done.stdout.splitlines() if line.count("|") >= 4)
        return {row[1]: _engine_job(row[0], *row[2:]) for row in rows}

    def cancel(self, job: EngineJob) -> None:
        """Cancel a job that is queued; the runner of one that runs gets SIGTERM and saves."""
        _call("scancel", "--quiet", "--state=PENDING", job.id)
        _call("scancel", "--quiet", "--batch", "--signal=TERM", "--state=RUNNING", job.id)


def _engine_job(number: str, state: str, host: str, why: str) -> EngineJob:
    cause, words = _ENDS.get(state, (None, _NO_RECORD))
    return EngineJob(
        id=number,
        queued=f"Slurm: {why}" if state in _QUEUED else "",
        live=state in _LIVE,
        host=host,
        cause=cause,
        detail=f"{words} (job {number}, {state})",
    )


def _call(*words: str, script: str = "") -> subprocess.CompletedProcess[str]:
    """Call a program of Slurm; UnansweredError if it does not answer in time.

    It gets none of the environment that it could pass on to nodes.
    """
    env = {name: value for name, value in os.environ.items() if _ENVIRONMENT.fullmatch(name)}
    try:
        text = script and f"#!/bin/bash\n{script}\n"
        done = child.run(words, env=env, seconds=_CALL_SECONDS, text=text)
    except subprocess.TimeoutExpired as error:
        raise UnansweredError(f"{words[0]} has not answered for {_CALL_SECONDS:g} s") from error
    except OSError as error:
        raise UnansweredError(f"{words[0]} cannot be started: {error}") from error
    if done.returncode and re.search("Unable to contact|Socket timed out|Connection", done.stderr):
        raise UnansweredError(f"Slurm does not answer: {child.reason(done)}")
    return done
