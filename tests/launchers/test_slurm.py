"""Runs as jobs of a real Slurm: two nodes on this machine, whose parts are killed."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.errors import BusyError, ConfigError, LaunchError
from flowrl.launchers import claims, process, remote, run_status, slurm
from flowrl.launchers.base import ExitCause, Exited, Finished, Job, Lost
from flowrl.launchers.slurm import SlurmLauncher, checked_options
from flowrl.paths import JobPaths
from tests.launchers.conftest import READY, SAVING, SLEEP, end_of, signal_to, start_of, until
from tests.launchers.slurm_cluster import Cluster, cluster, missing
from tests.machine import program
from tests.parallel.test_shared_folder import needs_hosts

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=missing()),
    pytest.mark.xdist_group("slurm"),
]
QUICK = "import time; time.sleep(1)\n"


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("slurm")) as made:
        yield made


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask Slurm every second, and wait for one beat where users wait for two."""
    monkeypatch.setattr(remote, "LISTED_SECONDS", 1.0)
    monkeypatch.setattr(remote, "_STILL_SECONDS", 6.0)


@pytest.fixture
def broken(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster of this test's own, whose controller or nodes it kills."""
    with cluster(tmp_path_factory.mktemp("own")) as made:
        yield made


@pytest.fixture
def launcher(machines: Cluster) -> Iterator[SlurmLauncher]:
    made = SlurmLauncher()
    made.check()
    yield made
    machines.clear()


def test_a_run_ends_well_and_leaves_no_claim(launcher: SlurmLauncher, make_job):
    job = make_job("print('hello')")
    handle = launcher.launch(job)
    assert (handle.engine, handle.engine_id.isdigit()) == ("slurm", True)
    assert end_of(launcher, handle, job) == Finished(job.folder)
    until(lambda: "hello" in (job.folder / job.log).read_text())
    assert not claims.is_claimed(job.folder)
    assert not run_status.lock_held(job.folder)


def test_its_environment_is_the_jobs_and_not_on_a_command_line(
    launcher: SlurmLauncher, machines: Cluster, make_job, monkeypatch
):
    monkeypatch.setenv("CANARY_KEY", "sk-never-seen")
    source = "import os; print(sorted(os.environ))\n" + SLEEP
    job = make_job(source)
    handle = launcher.launch(job)
    start_of(job)
    shown = machines.call("scontrol", "show", "job", handle.engine_id)
    places = (machines.folder, machines.spool)
    paths = [path for place in places for path in place.rglob("*")]
    spooled = [path.read_bytes() for path in paths if path.is_file()]
    launcher.stop(handle, job.folder)
    end_of(launcher, handle, job)
    assert "sk-never-seen" not in shown
    assert not any(b"sk-never-seen" in text for text in spooled)
    assert "CANARY_KEY" not in (job.folder / job.log).read_text()
    assert not JobPaths(job.folder).environment_json.exists()


def test_a_run_that_is_asked_to_end_saves(launcher: SlurmLauncher, make_job):
    job = make_job(SAVING + SLEEP)
    handle = launcher.launch(job)
    start_of(job)
    launcher.stop(handle, job.folder)
    outcome = end_of(launcher, handle, job)
    assert isinstance(outcome, Exited)
    assert (outcome.cause, outcome.code) == (ExitCause.STOPPED, 85)


def test_it_is_asked_by_its_claim_while_slurm_is_down(broken: Cluster, make_job, monkeypatch):
    launcher = SlurmLauncher()
    job = make_job(SAVING + SLEEP)
    handle = launcher.launch(job)
    start_of(job)
    monkeypatch.setattr(slurm, "_CALL_SECONDS", 1.0)
    broken.kill("slurmctld")
    try:
        with pytest.raises(remote.UnansweredError):
            launcher.stop(handle, job.folder)
        until((job.folder / "exit.json").exists)
    finally:
        broken.restart_controller()
    monkeypatch.undo()
    outcome = end_of(launcher, handle, job)
    assert isinstance(outcome, Exited)
    assert (outcome.cause, outcome.code) == (ExitCause.STOPPED, 85)


def test_a_persons_scancel_is_told_as_that(launcher: SlurmLauncher, machines: Cluster, make_job):
    job = make_job(SAVING + SLEEP)
    handle = launcher.launch(job)
    start_of(job)
    machines.call("scancel", handle.engine_id)
    outcome = end_of(launcher, handle, job)
    assert isinstance(outcome, Exited)
    assert outcome.cause is ExitCause.SESSION_KILLED
    assert "cancelled in Slurm" in outcome.detail


def test_a_queued_run_says_why_it_waits_and_can_be_taken_back(launcher, machines, make_job):
    busy = [make_job(SLEEP, name=f"busy_{number}") for number in range(2)]
    all_of_a_node = SlurmLauncher(["exclusive"])
    handles = [all_of_a_node.launch(job) for job in busy]
    for job in busy:
        start_of(job)
    waiting = make_job(SLEEP)
    handle = launcher.launch(waiting)
    assert launcher.poll(handle, waiting.folder) is None
    assert launcher.queued(handle).startswith("Slurm: ")
    assert run_status.lock_held(waiting.folder)
    launcher.stop(handle, waiting.folder)
    outcome = end_of(launcher, handle, waiting)
    assert isinstance(outcome, Exited)
    assert outcome.cause is ExitCause.STOPPED
    for handle, job in zip(handles, busy, strict=True):
        launcher.stop(handle, job.folder)
        end_of(launcher, handle, job)
    assert not (waiting.folder / "start.json").exists()


def test_one_that_slurm_took_and_nobody_heard_of_is_adopted(launcher, make_job):
    job = make_job(SLEEP)
    first = launcher.launch(job)
    claim = claims.claim_of(job.folder)
    assert claim is not None
    claims.write_claim(job.folder, replace(claim, engine_id=""))  # killed before the answer came
    again = SlurmLauncher()
    assert again.launch(job) == first
    launcher.stop(first, job.folder)
    end_of(launcher, first, job)


def test_one_that_was_never_submitted_is_started(launcher, make_job):
    job = make_job(QUICK)
    claim = claims.Claim(run_id=job.run_id, launch="e0.a1.x.lost", engine="slurm")
    claims.write_claim(job.folder, claim)
    assert launcher.find(job) is None
    assert isinstance(end_of(launcher, launcher.launch(job), job), Finished)


@pytest.mark.slow
def test_a_controller_that_forgets_a_live_run_loses_nothing(broken, make_job):
    launcher = SlurmLauncher()
    job = make_job(SLEEP)
    handle = launcher.launch(job)
    start = start_of(job)
    broken.restart_controller(clean=True)  # it has the nodes kill what it does not know
    launcher = SlurmLauncher()
    assert isinstance(end_of(launcher, handle, job), Lost)
    assert not process.alive(start.job_pid or 0, start.job_start_time)
    again = replace(job, argv=("/bin/true",))
    assert isinstance(end_of(launcher, launcher.launch(again), again), Finished)


@pytest.mark.slow
def test_a_run_outlives_the_daemon_of_its_node(broken, make_job):
    launcher = SlurmLauncher()
    job = make_job(READY + "import time; time.sleep(12)\n")
    handle = launcher.launch(job)
    start_of(job)
    for node in broken.nodes:
        broken.kill(f"slurmd.{node}")
    try:
        assert isinstance(end_of(launcher, handle, job), Finished)
    finally:
        for node in broken.nodes:
            broken.start_node(node)


def test_a_killed_runner_is_found_out_by_its_beat(launcher, make_job):
    job = make_job(SLEEP)
    handle = launcher.launch(job)
    start = start_of(job)
    signal_to(start.runner_pid)
    until(lambda: not process.alive(start.job_pid or 0, start.job_start_time))
    outcome = end_of(launcher, handle, job)
    assert isinstance(outcome, Lost)
    assert isinstance(
        end_of(launcher, launcher.launch(replace(job, argv=("/bin/true",))), job), Finished
    )


def test_a_run_whose_place_was_taken_ends_without_a_record(launcher, make_job):
    job = make_job(SLEEP)
    launcher.launch(job)
    start = start_of(job)
    claims.remove_claim(job.folder)  # it was taken for lost
    until(lambda: not process.alive(start.runner_pid, start.runner_start_time))
    assert not process.alive(start.job_pid or 0, start.job_start_time)
    assert not (job.folder / "exit.json").exists()


def test_a_launch_that_comes_late_starts_nothing(launcher, make_job):
    job = make_job("open('ran', 'a').write('x')\n" + QUICK)
    late = "e0.a1.x.late"
    run_status.prepare(job, grace_seconds=1.0, launch="e0.a1.x.other", lost_after=120)
    launcher.submit(job, late)
    until(lambda: "has taken the place" in (job.folder / job.log).read_text())
    assert not (job.folder / "ran").exists()


@needs_hosts
def test_a_host_that_does_not_see_the_graphs_folder_is_named_with_the_remedy(broken, make_job):
    job = make_job(QUICK)
    broken.kill("slurmd.n2")
    hidden = f"mount -t tmpfs none {job.folder.parent} && exec slurmd -N n2"
    broken._run("unshare", "--mount", "sh", "-c", hidden)
    until(lambda: broken.idle() == 2, every=0.1)
    launcher = SlurmLauncher(["nodelist=n2"])
    outcome = end_of(launcher, launcher.launch(job), job)
    assert isinstance(outcome, Lost)
    assert "n2 has written nothing to the graph's folder" in outcome.detail
    assert "the same paths on all hosts" in outcome.detail
    assert "FAILED" in outcome.detail
    assert not claims.is_claimed(job.folder)
    elsewhere = SlurmLauncher(["nodelist=n1"])
    assert isinstance(end_of(elsewhere, elsewhere.launch(job), job), Finished)


@pytest.mark.slow
def test_a_preempted_run_goes_on_and_is_not_blamed(launcher, machines, make_job):
    jobs = [make_job(SLEEP, name=f"low_{number}") for number in range(2)]
    handles = [SlurmLauncher(["exclusive"]).launch(job) for job in jobs]
    for job in jobs:
        start_of(job)
    urgent = make_job(QUICK, name="urgent")
    high = SlurmLauncher(["partition=high", "exclusive"])
    ending = high.launch(urgent)
    assert isinstance(end_of(high, ending, urgent), Finished)
    gone = next(n for n, job in enumerate(jobs) if not process.alive(*_runner(job)))
    outcome = end_of(launcher, handles[gone], jobs[gone])
    assert isinstance(outcome, Exited)
    assert outcome.cause is ExitCause.SERVER_KILLED
    assert "gave its place" in outcome.detail
    left = 1 - gone
    launcher.stop(handles[left], jobs[left].folder)
    end_of(launcher, handles[left], jobs[left])


@pytest.mark.slow
def test_a_time_limit_ends_with_a_checkpoint(machines, make_job):
    job = make_job(SAVING + SLEEP)
    short = SlurmLauncher(["time=1"])  # a minute: SIGTERM comes 60 s before its end
    outcome = end_of(short, short.launch(job), job, seconds=120.0)
    assert isinstance(outcome, Exited)
    assert (outcome.cause, outcome.code) == (ExitCause.STOPPED, 85)


@pytest.mark.slow
def test_a_dead_controller_is_no_dead_run(broken, make_job, monkeypatch):
    launcher = SlurmLauncher()
    monkeypatch.setattr(slurm, "_CALL_SECONDS", 1.0)
    job = make_job(SLEEP)
    handle = launcher.launch(job)
    start_of(job)
    broken.kill("slurmctld")
    try:
        blind = SlurmLauncher(lost_after=30)
        for _ in range(3):
            assert blind.poll(handle, job.folder) is None
        with pytest.raises(BusyError, match="squeue"):
            blind.list_jobs()
        with pytest.raises(ConfigError, match="sinfo"):
            blind.check()
    finally:
        broken.restart_controller()
    monkeypatch.undo()
    launcher.stop(handle, job.folder)
    end_of(launcher, handle, job)


def test_a_partition_that_is_not_there_is_refused_before_anything_is_written(launcher, make_job):
    job = make_job(QUICK)
    wrong = SlurmLauncher(["partition=nowhere"])
    with pytest.raises(ConfigError, match=r"(?i)^--slurm_args: .*invalid partition"):
        wrong.check()
    with pytest.raises(LaunchError, match=r"(?i)invalid partition"):
        wrong.launch(job)
    assert not claims.is_claimed(job.folder)
    assert not (job.folder / "spec.json").exists()


def test_a_slurm_that_takes_no_job_names_the_launcher(tmp_path, monkeypatch):
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho no cluster >&2; exit 1\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(ConfigError, match=r"^--launcher slurm: .*no cluster; start again once"):
        SlurmLauncher().check()


def test_a_missing_slurm_names_the_remedy(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="login node"):
        SlurmLauncher().check()


def test_a_program_that_hangs_is_not_waited_for(launcher, make_job, tmp_path, monkeypatch):
    monkeypatch.setattr(slurm, "_CALL_SECONDS", 0.5)
    program(tmp_path / "bin" / "sbatch", "sleep 60")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    job, began = make_job(QUICK), time.monotonic()
    with pytest.raises(BusyError, match="has not answered"):
        launcher.launch(job)
    assert time.monotonic() - began < 30
    assert claims.is_claimed(job.folder)  # it may have been taken
    monkeypatch.undo()
    assert isinstance(end_of(launcher, launcher.launch(job), job), Finished)


@given(st.text(max_size=40))
def test_no_word_becomes_anything_but_a_resource(word: str):
    try:
        (option,) = checked_options([word])
    except ConfigError:
        return
    name, _, value = option.removeprefix("--").partition("=")
    assert name in slurm._OPTIONS
    assert not set(value) & set(" \t\n\r;'\"`$\\<>#~{}\0")


@pytest.mark.parametrize(
    "word", ["wrap=id", "export=ALL", "--partition=x", "partition=a b", "mem=1;id", "uid=0",
             "output=/etc/passwd", "chdir=/", "mail-user=x", "partition=\n", "=", "get-user-env"],
)  # fmt: skip
def test_words_that_change_what_is_run_are_refused(word: str):
    with pytest.raises(ConfigError, match="slurm_args"):
        checked_options([word])


def _runner(job: Job) -> tuple[int, str]:
    start = start_of(job)
    return start.runner_pid, start.runner_start_time
