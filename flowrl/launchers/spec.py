"""spec.json: what the runner is to do, and the environment in it, which outlives no run."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from flowrl import storage
from flowrl.errors import FileRefusedError
from flowrl.launchers.job import Job
from flowrl.paths import RunPaths
from flowrl.redaction import secrets_of

FORMAT = 1


def write(job: Job, *, grace_seconds: float) -> None:
    """Say what to run, and, for the log's writer alone, what must not be logged; begin the log."""
    place = RunPaths(job.folder, expert=0)
    secrets = secrets_of(job.env, job.passed)
    if secrets:
        storage.write_json(place.secrets_json, {"format": FORMAT, "secrets": secrets})
    else:
        storage.remove_file(place.secrets_json)
    spec = {
        "format": FORMAT,
        "run_id": job.run_id,
        "argv": list(job.argv),
        "env": dict(job.env),
        "cwd": str(job.cwd),
        "grace_seconds": grace_seconds,
        "cpus": list(job.cpus),
        "sandbox": list(job.sandbox),
    }
    _begin_log(place.training_log)
    # A power cut that takes it takes the runner, too: the next launch writes it anew.
    storage.write_json(place.spec_json, spec, durable=False)


def is_missing(folder: Path) -> bool:
    """Whether nobody has begun to launch this folder, so that nothing of it lives anywhere."""
    return not os.path.lexists(RunPaths(folder, expert=0).spec_json)


def forget_environment(place: RunPaths) -> None:
    """Leave no secret in the folder of a run that is over; its runner has done so if it could.

    Nor anything else that it has begun: a killed one leaves the file that exit.json was to become.
    """
    storage.remove_file(place.secrets_json)
    remove_log_pipe(place)
    storage.remove_part_files(place.folder)
    try:
        spec = storage.read_json(place.spec_json)
    except FileRefusedError:
        return
    if not spec.get("env"):
        return
    try:
        storage.write_json(place.spec_json, {**spec, "env": {}})
    except OSError:  # a full disk takes nothing, but gives
        storage.remove_file(place.spec_json)


def make_log_pipe(folder: Path) -> Path | None:
    """A pipe through which the runner's fork will be given the log; None where none can be."""
    path = RunPaths(folder, expert=0).log_pipe
    try:
        storage.make_pipe(path)
    except OSError:
        return None
    return path


def remove_log_pipe(place: RunPaths) -> None:
    """Let go whoever waits at the pipe of a run that never began, or is over."""
    with suppress(OSError):  # no descriptor to be had, or something else lies there
        storage.remove_pipe(place.log_pipe)


def _begin_log(path: Path) -> None:
    """Have a log from the start, for whoever follows it; one that is no plain file is removed."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        storage.remove_file(path)
    storage.make_file(path)
