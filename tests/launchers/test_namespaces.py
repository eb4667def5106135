"""Runs in a container on this machine: their process ids mean nothing here."""

from __future__ import annotations

import subprocess
import sys
import time

from flowrl.launchers import run_status
from flowrl.launchers.base import ExitCause, Exited, Handle
from flowrl.launchers.local import LocalLauncher
from flowrl.paths import JobPaths
from tests.launchers.conftest import SLEEP, end_of, start_of
from tests.parallel.test_shared_folder import HOST, needs_hosts


@needs_hosts
def test_a_healthy_run_in_a_container_is_left_alone(make_job):
    job = make_job(SLEEP)
    run_status.prepare(job, grace_seconds=1.0)
    words = [sys.executable, "-I", "-S", str(run_status.RUNNER)]
    inside = subprocess.Popen([*HOST, *words, str(JobPaths(job.folder).spec_json)])
    start = start_of(job)
    handle = Handle(
        run_id=job.run_id,
        session=job.name,
        pid=start.runner_pid,
        start_time=start.runner_start_time,
    )
    launcher = LocalLauncher()
    for _ in range(5):
        assert launcher.poll(handle, job.folder) is None
        time.sleep(0.1)
    assert inside.poll() is None
    assert run_status.lock_held(job.folder)
    launcher.stop(handle, job.folder)  # its command line is seen from here
    outcome = end_of(launcher, handle, job)
    assert isinstance(outcome, Exited)
    assert outcome.cause is ExitCause.STOPPED
    inside.wait()
