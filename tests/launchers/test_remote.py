"""What an engine's launcher makes of files, claims and silence; the engine is a list."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace

import pytest

from flowrl.errors import EXIT_BUSY, BusyError
from flowrl.launchers import claims, process, remote, run_status, runner, slurm
from flowrl.launchers.base import ExitCause, Exited, Finished, Job, Lost
from flowrl.launchers.claims import Claim
from flowrl.launchers.local import LocalLauncher
from flowrl.launchers.remote import EngineJob, EngineLauncher, UnansweredError
from flowrl.paths import JobPaths
from tests.launchers.conftest import SAVING, SLEEP, end_of, start_of
from tests.waiting import limit, until

QUEUED, LIVE = EngineJob(id="1", queued="it is full", live=True), EngineJob(id="1", live=True)


class Engine(EngineLauncher):
    """An engine that lists what it is told and starts nothing."""

    engine = "fake"

    def __init__(self, job: EngineJob | None = QUEUED, **facts: float) -> None:
        super().__init__(**facts)
        self.job, self.launches, self.answers = job, list[str](), True
        self.calls, self.cancelled = 0, list[str]()

    def submit(self, job: Job, launch: str) -> str:
        if not self.answers:
            raise UnansweredError("nobody there")
        self.launches.append(launch)
        return "1"

    def list_jobs(self) -> Mapping[str, EngineJob]:
        self.calls += 1
        if not self.answers:
            raise UnansweredError("nobody there")
        return {launch: self.job for launch in self.launches if self.job}

    def cancel(self, job: EngineJob) -> None:
        self.cancelled.append(job.id)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "LISTED_SECONDS", 0.0)
    monkeypatch.setattr(remote, "_AGAIN_SECONDS", 0.0)
    monkeypatch.setattr(remote, "_STILL_SECONDS", 0.05)


def record_end(job: Job, code: int, **facts: object) -> None:
    spec = {"run_id": job.run_id, **facts}
    runner.finish(spec, str(job.folder), code=code)


def test_a_claim_that_nobody_took_keeps_the_folder_no_longer_than_it_is_asked_for(make_job):
    engine, job = Engine(), make_job(SLEEP)
    engine.answers = False
    with pytest.raises(BusyError, match="nobody there"):
        engine.launch(job)
    assert run_status.lock_held(job.folder)  # it may have been taken
    engine.answers = True
    assert engine.find(job) is None
    assert not run_status.lock_held(job.folder)


def test_a_run_of_this_machine_is_adopted_and_ends_as_one(make_job, local: LocalLauncher):
    job = make_job(SAVING + SLEEP)
    handle, engine = local.launch(job), Engine()
    start_of(job)
    for _ in range(3):
        assert engine.poll(handle, job.folder) is None
    found = engine.find(job)
    assert found is not None
    assert (found.engine, found.pid) == ("", handle.pid)
    assert engine.launch(job) == found
    engine.stop(found, job.folder)
    outcome = end_of(engine, found, job)
    assert isinstance(outcome, Exited)
    assert (outcome.cause, outcome.code) == (ExitCause.STOPPED, 85)
    assert engine.launches == []


def test_a_recorded_end_is_found_once_its_claim_is_gone(make_job):
    """The scheduler's state was lost before the result was merged."""
    engine, job = Engine(), make_job(SLEEP)
    handle = engine.launch(job)
    (launch,) = engine.launches
    facts = {"runner_pid": 2, "runner_start_time": "other:1", "job_pid": None, "pane": None}
    facts |= {"job_start_time": "", "server_pid": None, "started_at": 1.0, "launch": launch}
    start = {"format": 1, "run_id": job.run_id, **facts}
    runner.write_record(str(job.folder), "start.json", start)
    assert engine.find(job) == handle
    record_end(job, 0, launch=launch)
    assert engine.poll(handle, job.folder) == Finished(job.folder)
    assert not claims.is_claimed(job.folder)
    again = Engine().find(job)
    assert again is not None
    assert Engine().poll(again, job.folder) == Finished(job.folder)


def test_a_queued_run_outlasts_its_engines_silence(make_job):
    engine, job = Engine(lost_after=0.0), make_job(SLEEP)
    handle = engine.launch(job)
    assert engine.poll(handle, job.folder) is None
    engine.answers = False
    for _ in range(3):
        assert engine.poll(handle, job.folder) is None
        time.sleep(0.05)
    assert engine.queued(handle) == "it is full"
    blind = Engine(lost_after=0.0)  # a scheduler that has been started anew
    blind.answers = False
    assert blind.poll(handle, job.folder) is None
    assert blind.queued(handle) == "nobody there"
    claims.ask_to_end(job.folder)
    outcome = blind.poll(handle, job.folder)
    assert isinstance(outcome, Exited)
    assert outcome.cause is ExitCause.STOPPED


def test_a_run_that_beats_is_not_queued_whatever_an_older_list_says(make_job):
    engine, job = Engine(), make_job(SLEEP)
    handle = engine.launch(job)
    assert engine.poll(handle, job.folder) is None
    assert engine.queued(handle) == "it is full"
    JobPaths(job.folder).beat.touch()
    assert engine.queued(handle) == ""


def test_a_number_that_was_given_twice_is_not_cancelled(make_job):
    engine, job = Engine(), make_job(SLEEP)
    handle = engine.launch(job)
    engine.launches = ["e9.a1.other.launch"]  # job 1 is another's after the controller's crash
    engine.stop(handle, job.folder)
    assert engine.cancelled == []
    assert engine.queued(handle) == ""


def test_a_silent_engine_is_asked_once_for_many_runs(make_job, monkeypatch):
    engine, jobs = Engine(LIVE), [make_job(SLEEP, run_id=f"e0.a{n}.x") for n in range(5)]
    handles = [engine.launch(job) for job in jobs]
    monkeypatch.setattr(remote, "LISTED_SECONDS", 60.0)
    engine.answers, engine.calls, engine._listed_at = False, 0, float("-inf")
    for job, handle in zip(jobs, handles, strict=True):
        JobPaths(job.folder).beat.touch()
        assert engine.poll(handle, job.folder) is None
    assert engine.calls == 1


def test_waiting_for_a_job_that_takes_long_to_end_rests(make_job):
    """Its end is recorded, and the engine still cleans up after it."""
    engine, job = Engine(LIVE), make_job(SLEEP)
    handle = engine.launch(job)
    record_end(job, 85, launch=engine.launches[0])
    assert engine.poll(handle, job.folder) is None
    began = time.monotonic()
    assert engine.wait([handle], timeout_seconds=5.0)
    assert 0.1 < time.monotonic() - began < limit(2.0)
    engine.job = replace(LIVE, live=False)
    assert isinstance(engine.poll(handle, job.folder), Exited)


def test_the_record_of_an_earlier_launch_does_not_end_a_later_one(make_job):
    """Its runner's disk hung while it wrote it, and it was taken for lost meanwhile."""
    engine, job = Engine(LIVE), make_job(SLEEP)
    handle = engine.launch(job)
    record_end(job, 0, launch=f"{job.run_id}.before")
    assert engine.poll(handle, job.folder) is None
    assert claims.is_claimed(job.folder)
    JobPaths(job.folder).exit_json.unlink()
    record_end(job, 0, launch=engine.launches[0])
    assert engine.poll(handle, job.folder) == Finished(job.folder)


def test_a_record_that_a_network_disk_hides_is_found(make_job, monkeypatch):
    """Names that were missing stay so for up to a minute, unless this machine writes there."""
    engine, job = Engine(LIVE), make_job(SLEEP)
    handle, (launch,) = engine.launch(job), engine.launches
    engine.job = replace(LIVE, live=False)
    monkeypatch.setattr(
        remote.storage, "try_writing", lambda folder: record_end(job, 0, launch=launch)
    )
    assert end_of(engine, handle, job) == Finished(job.folder)


def test_an_empty_record_that_a_sandbox_has_made_ends_no_wait(make_job):
    engine, job = Engine(LIVE), make_job(SLEEP)
    handle = engine.launch(job)
    assert engine.poll(handle, job.folder) is None
    record = JobPaths(job.folder).exit_json
    record.touch()
    assert not engine.wait([handle], timeout_seconds=0.6)
    record.write_text("{}")
    assert engine.wait([handle], timeout_seconds=60.0)


def test_launches_do_not_make_the_engine_list_its_jobs_again(make_job, monkeypatch):
    for name in ("LISTED_SECONDS", "_STILL_SECONDS"):
        monkeypatch.setattr(remote, name, 60.0)
    engine, handles = Engine(LIVE), []
    for number in range(3):
        job = make_job("", name=f"job_{number}")
        handles.append((engine.launch(job), job))
        assert [engine.poll(handle, one.folder) for handle, one in handles] == [None] * (number + 1)
    assert engine.calls == 1


@pytest.mark.parametrize("beats", [False, True])
def test_only_a_host_that_wrote_nothing_is_told_to_share_the_folder(make_job, beats):
    engine, job = Engine(), make_job(SLEEP)
    handle = engine.launch(job)
    if beats:
        JobPaths(job.folder).beat.touch()
    engine.job = EngineJob(id="1", host="n1", detail="it left no record (job 1, FAILED)")
    outcome = end_of(engine, handle, job)
    assert isinstance(outcome, Lost)
    assert outcome.detail.endswith("it left no record (job 1, FAILED)")
    assert ("n1 has written nothing to the graph's folder" in outcome.detail) is not beats


@pytest.mark.parametrize(
    ("state", "host", "cause", "words"),
    [
        ("OUT_OF_MEMORY", "n1", ExitCause.OOM, "for lack of memory"),
        ("NODE_FAIL", "n1", ExitCause.SERVER_KILLED, "its node failed"),
        ("BOOT_FAIL", "", ExitCause.SERVER_KILLED, "its node did not start"),
        ("TIMEOUT", "n1", ExitCause.SERVER_KILLED, "time limit was reached"),
        ("PREEMPTED", "n1", ExitCause.SERVER_KILLED, "gave its place to another job"),
        ("REVOKED", "", ExitCause.SERVER_KILLED, "left no record"),
        ("CANCELLED", "", ExitCause.SESSION_KILLED, "cancelled in Slurm"),
        ("CANCELLED", "n1", None, "cancelled in Slurm"),
        ("FAILED", "n1", None, "left no record"),
        ("COMPLETED", "n1", None, "left no record"),
        ("A_NEW_STATE", "n1", None, "left no record"),
    ],
)
def test_each_end_in_slurm_without_a_record_has_its_cause(make_job, state, host, cause, words):
    engine, job = Engine(), make_job(SLEEP)
    handle = engine.launch(job)
    engine.job = slurm._engine_job("7", state, host, "None")
    assert engine.poll(handle, job.folder) is None  # its beat may come
    time.sleep(0.1)
    outcome = engine.poll(handle, job.folder)
    assert isinstance(outcome, Lost if cause is None else Exited)
    assert getattr(outcome, "cause", None) is cause
    assert words in outcome.detail
    assert f"(job 7, {state})" in outcome.detail


def test_a_run_of_a_host_that_is_called_lost_is_not_started_again_while_its_lease_may_last(
    make_job,
):
    """The host may only be cut off from its engine and from the disk, and train on."""
    engine, job = Engine(lost_after=1.0), make_job(SLEEP)
    handle = engine.launch(job)
    JobPaths(job.folder).beat.touch()
    engine.job, began = slurm._engine_job("7", "NODE_FAIL", "n1", "None"), time.monotonic()
    assert isinstance(end_of(engine, handle, job), Exited)
    assert time.monotonic() - began > 0.5


@pytest.mark.parametrize("state", ["PENDING", "REQUEUED", "RUNNING", "SUSPENDED", "COMPLETING"])
def test_a_job_that_slurm_keeps_is_not_dead(make_job, state):
    engine, job = Engine(lost_after=0.0), make_job(SLEEP)
    handle = engine.launch(job)
    engine.job = slurm._engine_job("7", state, "", "Resources")
    for _ in range(2):
        assert engine.poll(handle, job.folder) is None
        time.sleep(0.1)
    queued = state in ("PENDING", "REQUEUED")
    assert engine.queued(handle) == ("Slurm: Resources" if queued else "")


@pytest.mark.parametrize("hours", [-1, 1], ids=["behind", "ahead"])
@pytest.mark.parametrize("answers", [True, False])
def test_a_beat_of_a_clock_that_is_an_hour_off_counts_while_it_moves(make_job, hours, answers):
    engine, job = Engine(lost_after=0.3), make_job(SLEEP)
    handle, beat = engine.launch(job), JobPaths(job.folder).beat
    beat.touch()
    engine.job, engine.answers = None, answers  # the engine has forgotten it, or is silent
    for number in range(8):
        os.utime(beat, (time.time(), time.time() + 3600 * hours + number))
        assert engine.poll(handle, job.folder) is None
        time.sleep(0.1)
    time.sleep(0.4)
    assert isinstance(engine.poll(handle, job.folder), Lost)


@pytest.mark.parametrize(("host", "ended"), [("", Exited), ("n1", Lost)])
def test_only_a_job_that_no_host_was_given_is_cancelled_by_hand_without_a_record(
    make_job, host, ended
):
    """A controller that has lost its state calls jobs cancelled whose runner was just starting."""
    engine, job = Engine(), make_job(SLEEP)
    handle = engine.launch(job)
    engine.job = EngineJob(id="1", host=host, cause=ExitCause.SESSION_KILLED, detail="cancelled")
    assert isinstance(end_of(engine, handle, job), ended)


def test_a_runner_whose_disk_hangs_ends_its_job_before_others_may_start_it_again(make_job):
    """A claim that is a pipe lets its readers wait, as a hard mount of NFS does."""
    job = make_job(SLEEP)
    run_status.prepare(job, grace_seconds=1.0, launch="e0.a1.x.l", lost_after=4.0)
    claims.write_claim(job.folder, Claim(run_id=job.run_id, launch="e0.a1.x.l", engine="fake"))
    words = [sys.executable, "-I", "-S", str(run_status.RUNNER)]
    started = subprocess.Popen([*words, str(JobPaths(job.folder).spec_json), "e0.a1.x.l"])
    start, claim = start_of(job), JobPaths(job.folder).engine_json
    written = claim.read_text()
    claim.unlink()
    os.mkfifo(claim)
    until(lambda: not process.alive(start.job_pid or 0, start.job_start_time))
    assert started.poll() is None  # it waits for the disk
    hung = os.open(claim, os.O_WRONLY)
    claim.unlink()
    claim.write_text(written)
    os.close(hung)
    assert started.wait() == EXIT_BUSY
    assert not JobPaths(job.folder).exit_json.exists()
