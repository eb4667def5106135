"""Runs in a container on this machine: their process ids mean nothing here."""

from __future__ import annotations

import subprocess
import sys
import time

from flowrl.launchers import claims, run_status
from flowrl.launchers.base import ExitCause, Exited, Handle, Lost
from flowrl.launchers.local import LocalLauncher
from flowrl.paths import JobPaths
from tests.launchers.conftest import SLEEP, end_of, start_of
from tests.machine import HOST
from tests.parallel.test_shared_folder import needs_hosts


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


@needs_hosts
def test_a_run_that_another_host_has_in_a_shared_folder_lives_as_long_as_it_beats(make_job):
    job, launch = make_job(SLEEP), "e0.a1.x.launch"
    run_status.prepare(job, grace_seconds=1.0, launch=launch, lost_after=120.0)
    claims.write_claim(job.folder, claims.Claim(run_id=job.run_id, launch=launch, engine=""))
    inside = subprocess.Popen([*HOST, *run_status.runner_words(job)])
    start_of(job)
    launcher, later = LocalLauncher(), LocalLauncher()
    handle, later.lost_after = launcher.find(job), 0.2
    assert handle is not None
    for _ in range(3):
        assert launcher.launch(job) == handle  # it is adopted, not started twice
    began = time.monotonic()
    assert not launcher.wait([handle], timeout_seconds=0.3)
    assert time.monotonic() - began > 0.25  # nobody can look at its process
    assert later.poll(handle, job.folder) is None
    time.sleep(0.3)
    assert later.poll(handle, job.folder) is None  # its claim is gone; its lock is seen from here
    inside.wait()
    assert isinstance(end_of(later, handle, job), Lost)
    assert not JobPaths(job.folder).exit_json.exists()
