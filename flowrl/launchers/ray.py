"""The launcher of Ray, a leaf: each run's runner is a job of Ray's job server, spoken to by HTTP.

Jobs outlive the scheduler, and a job's name is ours, so a submission that is repeated is refused.
Ray itself is needed on the cluster alone. Without fault tolerance a head that dies forgets its jobs
and its nodes kill them: flowrl hears no beat and starts the runs again.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import shlex
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from flowrl.errors import ConfigError, LaunchError
from flowrl.launchers.base import ExitCause, Job
from flowrl.launchers.remote import EngineJob, EngineLauncher, UnansweredError, runner_line

_CALL_SECONDS, _MOST_BYTES = 15.0, 2**26
_LIVE = frozenset({"PENDING", "RUNNING"})
_RESOURCE = re.compile(r"([A-Za-z][\w:.-]*)=(\d+(?:\.\d+)?)([kMG]?)", re.ASCII)
_POWERS = {"": 0, "k": 3, "M": 6, "G": 9}
_TOKEN = "RAY_AUTH_TOKEN"  # noqa: S105 — the variable's name


def checked_resources(words: Sequence[str]) -> dict[str, Any]:
    """Return words NAME=NUMBER as fields of a job; GPU and memory are known, others are custom.

    >>> checked_resources(["GPU=1", "big=0.5"])
    {'entrypoint_num_gpus': 1.0, 'entrypoint_resources': {'big': 0.5}}
    """
    fields: dict[str, Any] = {}
    for word in words:
        match = _RESOURCE.fullmatch(word)
        if match is None or match[1] == "CPU":
            raise ConfigError(
                f"--ray_resources {word!r:.80}: give NAME=NUMBER, e.g. GPU=1 memory=8G; "
                "--cpus_per_run says the CPUs"
            )
        number = float(match[2]) * 10 ** _POWERS[match[3]]
        if match[1] == "GPU":
            fields["entrypoint_num_gpus"] = number
        elif match[1] == "memory":
            fields["entrypoint_memory"] = int(number)
        else:
            fields.setdefault("entrypoint_resources", {})[match[1]] = number
    return fields


class RayLauncher(EngineLauncher):
    """The Launcher with a Ray cluster."""

    engine = "ray"

    def __init__(self, address: str, resources: Sequence[str] = (), **seconds: float) -> None:
        """Take the job server's address, http://HOST:8265, and what each run needs."""
        super().__init__(**seconds)
        if not re.fullmatch(r"https?://[\w.\[\]:-]+(:\d+)?/?", address, re.ASCII):
            raise ConfigError(
                f"--ray_address {address!r:.120}: give the job server as http://HOST:PORT"
            )
        self._address = address.rstrip("/")
        self._resources = checked_resources(resources)

    def check(self) -> None:
        """Raise ConfigError if no job server answers there."""
        try:
            self.list_jobs()
        except UnansweredError as error:
            raise ConfigError(
                f"--launcher ray: {error}; give --ray_address of a running cluster whose dashboard "
                "is on (pip install 'ray[default]')"
            ) from error

    def submit(self, job: Job, launch: str) -> str:
        """Submit the runner under the launch's own name."""
        env = {"RAY_JOB_STOP_WAIT_TIME_S": str(round(self.grace_seconds + 5))}
        fields = {
            "entrypoint": f"exec bash -c {shlex.quote(runner_line(job))}",
            "submission_id": launch,
            "entrypoint_num_cpus": job.num_cpus or 1,
            "metadata": {"run": job.name},
            "runtime_env": {"env_vars": env},
            **self._resources,
        }
        try:
            self._call("POST", "/api/jobs/", fields)
        except urllib.error.HTTPError as error:
            with self._answering():
                lines = error.read(2**16).decode(errors="replace").split("\n")
            if not any("already exists" in line for line in lines):
                said = [line for line in lines if re.match(r"\w+(Error|Exception): ", line)]
                raise LaunchError(f"Ray refuses {job.name}: {(said or lines)[-1]:.200}") from error
        return launch

    def list_jobs(self) -> Mapping[str, EngineJob]:
        """Ask for all jobs that the cluster knows."""
        try:
            rows = self._call("GET", "/api/jobs/")
            if not isinstance(rows, list):
                raise TypeError(f"{rows!r:.80} is no list of jobs")
            return {row["submission_id"]: _engine_job(row) for row in rows if row["submission_id"]}
        except (urllib.error.HTTPError, KeyError, TypeError) as error:
            raise UnansweredError(f"{self._address} is no job server of Ray: {error}") from error

    def cancel(self, job: EngineJob) -> None:
        """Take a job out of the queue; a runner that works reads its claim."""
        if job.queued:
            self._call("POST", f"/api/jobs/{job.id}/stop", {})

    def _call(self, method: str, path: str, fields: Any = None) -> Any:
        """Return the answer, decoded; UnansweredError without one, HTTPError for a refusal."""
        body = None if fields is None else json.dumps(fields).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(  # noqa: S310 — http or https, as checked
            self._address + path, method=method, data=body, headers=headers
        )
        if token := os.environ.get(_TOKEN):
            request.add_unredirected_header("Authorization", f"Bearer {token}")
        with (
            self._answering(),
            urllib.request.urlopen(request, timeout=_CALL_SECONDS) as answer,  # noqa: S310
        ):
            return json.loads(answer.read(_MOST_BYTES))

    @contextmanager
    def _answering(self) -> Iterator[None]:
        """Raise UnansweredError in place of what a lost or foreign answer raises in the block."""
        try:
            yield
        except urllib.error.HTTPError:
            raise
        except OSError as error:
            raise UnansweredError(f"{self._address} does not answer: {error}") from error
        except (http.client.HTTPException, ValueError) as error:
            what = f"{type(error).__name__} {error}"[:200]
            raise UnansweredError(f"{self._address} is no job server of Ray: {what}") from error


def _engine_job(row: Mapping[str, Any]) -> EngineJob:
    """Return what one line of the job server says.

    A job that ended without an exit code was ended by Ray: its node is lost, or it never started.
    """
    status, said = str(row["status"]), " ".join(str(row["message"]).split())
    by_ray = status == "FAILED" and row["driver_exit_code"] is None
    causes = {"STOPPED": ExitCause.SESSION_KILLED}
    words = {"STOPPED": "it was stopped in Ray"}.get(status, f"Ray: {said:.120}")
    return EngineJob(
        id=str(row["submission_id"]),
        queued=f"Ray: {said.partition('.')[0]:.60}" if status == "PENDING" else "",
        live=status in _LIVE,
        cause=ExitCause.SERVER_KILLED if by_ray else causes.get(status),
        detail=f"{words} ({status})",
    )
