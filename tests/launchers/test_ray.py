"""Runs as jobs of a real Ray cluster on this machine."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from socketserver import StreamRequestHandler, TCPServer

import pytest

from flowrl.errors import BusyError, ConfigError
from flowrl.experts.store import ExpertStore
from flowrl.launchers import claims, process, remote
from flowrl.launchers.base import ExitCause, Exited, Finished, Lost
from flowrl.launchers.ray import RayLauncher, checked_resources
from flowrl.paths import GraphPaths
from tests.games.installing import installed
from tests.launchers.conftest import SAVING, SLEEP, end_of, signal_to, start_of, until
from tests.launchers.ray_cluster import RayCluster, missing, ray_cluster
from tests.parallel.test_slurm_training import experts, train

needs_ray = pytest.mark.skipif(bool(missing()), reason=missing())


@pytest.fixture(scope="module")
def machines() -> Iterator[RayCluster]:
    with ray_cluster() as made:
        yield made


@pytest.fixture
def launcher(machines: RayCluster, monkeypatch: pytest.MonkeyPatch) -> RayLauncher:
    monkeypatch.setattr(remote, "LISTED_SECONDS", 1.0)
    monkeypatch.setattr(remote, "_STILL_SECONDS", 6.0)  # runners beat every five
    made = RayLauncher(machines.address)
    made.check()
    return made


@needs_ray
def test_a_run_ends_well_and_leaves_no_claim(launcher: RayLauncher, make_job):
    job = make_job("print('hello')")
    handle = launcher.launch(job)
    assert handle.engine == "ray"
    assert end_of(launcher, handle, job) == Finished(job.folder)
    until(lambda: "hello" in (job.folder / job.log).read_text())
    assert not claims.is_claimed(job.folder)


@needs_ray
def test_a_run_that_is_asked_to_end_saves(launcher: RayLauncher, make_job):
    job = make_job(SAVING + SLEEP)
    handle = launcher.launch(job)
    start_of(job)
    launcher.stop(handle, job.folder)
    outcome = end_of(launcher, handle, job)
    assert isinstance(outcome, Exited)
    assert (outcome.cause, outcome.code) == (ExitCause.STOPPED, 85)


@needs_ray
def test_a_persons_stop_is_told_as_that(launcher: RayLauncher, make_job):
    job = make_job(SAVING + SLEEP)
    handle = launcher.launch(job)
    start_of(job)
    launcher._call("POST", f"/api/jobs/{handle.engine_id}/stop", {})
    outcome = end_of(launcher, handle, job)
    assert isinstance(outcome, Exited)
    assert outcome.cause is ExitCause.SESSION_KILLED


@needs_ray
def test_a_queued_run_says_why_it_waits_and_can_be_taken_back(launcher: RayLauncher, make_job):
    job = make_job(SLEEP, num_cpus=64)
    handle = launcher.launch(job)
    assert launcher.poll(handle, job.folder) is None
    assert launcher.queued(handle).startswith("Ray: ")
    launcher.stop(handle, job.folder)
    outcome = end_of(launcher, handle, job)
    assert isinstance(outcome, Exited)
    assert outcome.cause is ExitCause.STOPPED
    assert not (job.folder / "start.json").exists()


@needs_ray
def test_a_submission_that_is_repeated_is_the_same_job(launcher: RayLauncher, make_job):
    job = make_job(SLEEP)
    first = launcher.launch(job)
    claim = claims.claim_of(job.folder)
    assert claim is not None
    assert launcher.submit(job, claim.launch) == first.engine_id
    claims.write_claim(job.folder, replace(claim, engine_id=""))  # killed before the answer came
    assert RayLauncher(launcher._address).launch(job) == first
    launcher.stop(first, job.folder)
    end_of(launcher, first, job)


@needs_ray
def test_a_killed_runner_is_found_out_by_its_beat(launcher: RayLauncher, make_job):
    job = make_job(SLEEP)
    handle = launcher.launch(job)
    start = start_of(job)
    signal_to(start.runner_pid)
    until(lambda: not process.alive(start.job_pid or 0, start.job_start_time))
    assert isinstance(end_of(launcher, handle, job), Lost)


@needs_ray
def test_a_lost_node_is_not_the_runs_fault(launcher: RayLauncher, machines, make_job):
    node = machines.start_node('--resources={"away": 1}')
    away = RayLauncher(machines.address, ["away=1"], lost_after=30)
    job = make_job(SLEEP)
    handle = away.launch(job)
    start = start_of(job)
    machines.kill(node)
    outcome = end_of(away, handle, job, seconds=180.0)
    assert isinstance(outcome, Exited)
    assert outcome.cause is ExitCause.SERVER_KILLED
    assert "Ray: " in outcome.detail
    until(lambda: not process.alive(start.job_pid or 0, start.job_start_time))


@needs_ray
@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("--target_skill=Pick Berry", "--total_timesteps=4k"), id="one skill"),
        pytest.param((), id="two skills", marks=pytest.mark.slow),
    ],
)
def test_skills_are_trained_to_the_experts_of_this_machine(machines, tmp_path, words):
    env = {**os.environ, "PYTHONPATH": installed(tmp_path)}
    on_ray = ("--launcher=ray", f"--ray_address={machines.address}")
    places = {"local": ("--launcher=local",), "ray": on_ray}
    daemons = [train(tmp_path, name, *at, *words, env=env) for name, at in places.items()]
    for daemon in daemons:
        _, said = daemon.communicate()
        assert daemon.returncode == 0, said
    assert experts(tmp_path / "ray") == experts(tmp_path / "local")
    merged = ExpertStore(GraphPaths(tmp_path / "ray")).manifest().merged
    assert len(merged) == (1 if words else 2)
    jobs = RayLauncher(machines.address).list_jobs()
    assert all(any(job.startswith(f"{run}.") for job in jobs) for run in merged)
    assert not list((tmp_path / "ray" / "training_runs").iterdir())


@needs_ray
@pytest.mark.slow
def test_a_head_that_dies_takes_its_jobs_along_and_they_start_again(make_job, monkeypatch):
    with ray_cluster() as own:
        launcher = RayLauncher(own.address, lost_after=30)
        job = make_job(SLEEP)
        handle = launcher.launch(job)
        start = start_of(job)
        own.kill()
        assert launcher.poll(handle, job.folder) is None
        with pytest.raises(BusyError, match="does not answer"):
            launcher.find(make_job(SLEEP, run_id="e0.a1.other")) or launcher.list_jobs()
        until(lambda: not process.alive(start.job_pid or 0, start.job_start_time))
        own.start_head()
        outcome = end_of(launcher, handle, job, seconds=120.0)
        assert isinstance(outcome, Lost)
        again = replace(job, argv=("/bin/true",))
        assert isinstance(end_of(launcher, launcher.launch(again), again), Finished)


def test_an_address_without_a_server_names_the_remedy(make_job):
    nobody = RayLauncher("http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"does not answer.*ray\[default\]"):
        nobody.check()
    job = make_job(SLEEP)
    with pytest.raises(BusyError, match="does not answer"):
        nobody.launch(job)
    assert claims.is_claimed(job.folder)  # it may have been taken


CUT_OFF = b"HTTP/1.1 %b\r\nTransfer-Encoding: chunked\r\n\r\nff\r\n[\r\n"
NO_HTTP = [b"\x00\x00\x18\x04 gRPC\r\n\r\n", CUT_OFF % b"200 OK", CUT_OFF % b"500 No"]


@pytest.mark.parametrize("answer", NO_HTTP, ids=["no HTTP", "cut off", "a refusal that is cut off"])
def test_an_answer_that_is_no_http_or_cut_off_is_none(make_job, answer):
    class Other(StreamRequestHandler):
        def handle(self) -> None:
            lines = iter(lambda: self.rfile.readline().strip(), b"")
            facts = dict(line.lower().split(b": ", 1) for line in lines if b": " in line)
            self.rfile.read(int(facts.get(b"content-length", 0)))
            self.wfile.write(answer)

    with TCPServer(("127.0.0.1", 0), Other) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        launcher = RayLauncher(f"http://127.0.0.1:{server.server_address[1]}")
        with pytest.raises(ConfigError, match="is no job server of Ray"):
            launcher.check()
        job = make_job(SLEEP)
        with pytest.raises(remote.UnansweredError):
            launcher.launch(job)
        assert claims.is_claimed(job.folder)  # it may have been taken
        server.shutdown()


@pytest.mark.parametrize("body", [b"<html>", b"{}", b"[1]", b'[{"submission_id": "a"}]', b"\xff"])
def test_a_server_of_something_else_is_told(body):
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Other) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(ConfigError, match="is no job server of Ray"):
            RayLauncher(f"http://127.0.0.1:{server.server_port}").check()
        server.shutdown()


@pytest.mark.parametrize(
    "address", ["ray://head:10001", "127.0.0.1:8265", "http://a:1/x", "file:///etc/passwd",
                "http://user:pw@host:1", "http://a b", "auto", ""],
)  # fmt: skip
def test_an_address_of_another_kind_is_refused(address):
    with pytest.raises(ConfigError, match="http://HOST:PORT"):
        RayLauncher(address)


@pytest.mark.parametrize(
    "word", ["GPU", "GPU=", "GPU=-1", "GPU=nan", "CPU=4", "=1", "a b=1", "x=1;"]
)
def test_what_is_no_resource_is_refused(word):
    with pytest.raises(ConfigError, match="NAME=NUMBER"):
        checked_resources([word])


def test_resources_are_fields_of_the_job():
    found = checked_resources(["GPU=0.5", "memory=2G", "accelerator_type:A100=0.001"])
    assert json.loads(json.dumps(found)) == {
        "entrypoint_num_gpus": 0.5,
        "entrypoint_memory": 2_000_000_000,
        "entrypoint_resources": {"accelerator_type:A100": 0.001},
    }
