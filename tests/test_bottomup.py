"""The sequential story with stand-in trainers: what it adopts, hears, refuses and writes down."""

from __future__ import annotations

import dataclasses
import fcntl
import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from flowrl import bottomup, bottomup_parallel, cli, console, ppo_flow, storage
from flowrl.bottomup import InProcessLauncher
from flowrl.commands import status
from flowrl.config import SequentialConfig, with_flags
from flowrl.errors import LaunchError
from flowrl.launchers.base import Finished, Handle, Job, Lost
from flowrl.parallel.events import RunRequest
from flowrl.parallel.training_backend import TrainingBackend
from flowrl.paths import RunPaths
from tests.parallel import stand_in
from tests.parallel.making import GRAPH, TABLE, WOOD
from tests.parallel.stand_in_story import DEADLINE_SECONDS, ROOT, Place

ALONE = ("--target_skill", WOOD, "--retry_backoff=0.01")


class Bench:
    """A graph's folder whose runs are trained by a stand-in, in this process."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.place = Place(folder)
        self.layout = self.place.layout
        self.monkeypatch = monkeypatch
        self.train_by(lambda argv: stand_in.main(list(argv)))

    def train_by(self, trainer) -> None:
        self.monkeypatch.setattr(ppo_flow, "main", trainer)

    def run(self, *flags: str) -> int:
        return bottomup.main([f"--graph_path={self.layout.root}", *flags])

    def job(self) -> Job:
        config = with_flags(SequentialConfig(), graph_path=self.layout.root)
        backend = TrainingBackend(self.layout, config, GRAPH)
        return backend.prepare(RunRequest(skill=WOOD, expert=0, attempt=1))

    def archived_log(self) -> str:
        return RunPaths(self.layout.skill_folder(0, WOOD), 0).training_log.read_text()


@pytest.fixture
def bench(tmp_path, monkeypatch):
    before = signal.getsignal(signal.SIGTERM)
    made = Bench(tmp_path, monkeypatch)
    yield made
    signal.signal(signal.SIGTERM, before)
    for daemon in made.place.daemons:
        daemon.kill()


def wait_for(path: Path, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not path.exists():
        assert process.poll() is None, "it ended too early"
        assert time.monotonic() < deadline
        time.sleep(0.02)


def never(*_):
    raise AssertionError("this must not be called")


def test_skills_are_trained_one_after_another_and_keep_a_log(bench, capsys):
    assert bench.run("--target_skill", TABLE) == 0
    assert bench.place.launches() == [WOOD, TABLE]
    assert set(bench.place.statuses().values()) == {"completed"}
    capsys.readouterr()
    assert cli.main(["logs", WOOD, "--graph-path", str(bench.layout.root)]) == 0
    log = capsys.readouterr().out
    (first, _), run_id = log.split("\n", 1), bench.place.merged()[0]
    assert "training skill_0_Collect_Wood" in first
    assert f"run {run_id} has ended: 100 frames, 1 updates" in log
    assert "success 90% (by step: 90%)" in log


def test_a_run_that_lives_in_a_session_is_adopted(bench):
    bench.place.order({WOOD: {"gate": "gate"}})
    daemon = bench.place.start("--launcher=local", *ALONE)
    wait_for(bench.place.folder / "launches", daemon)
    daemon.send_signal(signal.SIGTERM)
    assert daemon.wait(DEADLINE_SECONDS) == console.EXIT_INTERRUPTED
    run_id = bench.place.lines()[WOOD]["run_id"]
    wait = InProcessLauncher.wait

    def open_the_gate(self, handles, *, timeout_seconds):
        assert bench.place.statuses() == {WOOD: "running"}
        bench.place.open("gate")
        return wait(self, handles, timeout_seconds=timeout_seconds)

    bench.monkeypatch.setattr(InProcessLauncher, "wait", open_the_gate)
    bench.train_by(never)
    assert bench.run(*ALONE) == 0
    assert bench.place.merged() == (run_id,)
    assert not bench.layout.failed_runs.exists()


def test_a_run_whose_lock_is_held_is_not_trained_beside_its_process(bench):
    job = bench.job()
    bench.train_by(never)
    holder = os.open(RunPaths(job.folder, 0).lock, os.O_RDWR | os.O_CREAT)
    fcntl.flock(holder, fcntl.LOCK_EX)
    with pytest.raises(LaunchError, match=r"run\.lock"):
        InProcessLauncher().launch(job)
    of_a_session = Handle(run_id=job.run_id, session=job.name, pid=2**22 - 1)
    assert InProcessLauncher().poll(of_a_session, job.folder) is None, "it lives"
    os.close(holder)
    assert isinstance(InProcessLauncher().poll(of_a_session, job.folder), Lost)


def test_a_run_that_a_session_has_begun_is_found(bench):
    job = bench.job()
    assert InProcessLauncher().find(job) is None
    runner = {"pid": 2**22 - 1, "start_time": "boot:1"}
    start = {"run_id": job.run_id, "runner": runner, "job": None, "pane": None}
    path = RunPaths(job.folder, 0).start_json
    storage.write_json(path, {"format": 1, **start, "server_pid": None})
    found = InProcessLauncher().find(job)
    assert found is not None
    assert (found.session, found.pid) == (job.name, 2**22 - 1)


def test_a_later_process_knows_what_became_of_a_run_trained_by_an_earlier_one(bench):
    job = bench.job()
    handle = InProcessLauncher().launch(job)
    later = InProcessLauncher()
    assert later.find(job) == handle
    assert isinstance(later.poll(handle, job.folder), Finished)
    RunPaths(job.folder, 0).result_json.unlink()
    assert later.find(job) is None
    assert isinstance(later.poll(handle, job.folder), Lost)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda sent: sent.name)
def test_a_signal_ends_the_story_and_the_same_command_goes_on(bench, number):
    words = [f"--graph_path={bench.layout.root}", *ALONE]
    story = subprocess.Popen(
        [sys.executable, "-m", "tests.sequential_story", *words],
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    bench.place.daemons.append(story)
    begun = bench.place.folder / "begun"
    wait_for(begun, story)
    story.send_signal(number)
    _, said = story.communicate(timeout=DEADLINE_SECONDS)
    assert story.returncode == console.EXIT_INTERRUPTED, said
    assert len(begun.read_text().splitlines()) == 1, "it did not begin again"
    assert bottomup.ON_INTERRUPT in said
    assert "in their sessions" not in said
    assert f"To go on: python -m flowrl.bottomup --graph_path={bench.layout.root}" in said
    run_id = bench.place.lines()[WOOD]["run_id"]
    assert bench.run(*ALONE) == 0
    assert bench.place.merged() == (run_id,)


def test_stopping_the_parallel_story_says_that_runs_go_on(bench, capsys):
    def interrupted(_):
        raise KeyboardInterrupt

    bench.monkeypatch.setattr(bottomup_parallel, "train_graph", interrupted)
    assert bottomup_parallel.main(["--max_nodes=3"]) == console.EXIT_INTERRUPTED
    said = capsys.readouterr().err
    assert "go on in their sessions" in said
    assert "To go on: python -m flowrl.bottomup_parallel --max_nodes=3\n" in said


@pytest.mark.parametrize("crash", [RuntimeError, MemoryError], ids=lambda kind: kind.__name__)
def test_a_trainer_that_crashes_costs_its_skill_one_attempt(bench, crash):
    crashes = [crash("RESOURCE_EXHAUSTED: Out of memory")]

    def trainer(argv):
        if crashes:
            raise crashes.pop()
        return stand_in.main(list(argv))

    bench.train_by(trainer)
    assert bench.run(*ALONE) == 0
    assert bench.place.lines()[WOOD]["attempt"] == 2
    failed = dataclasses.replace(
        bench.layout.run(0, WOOD), folder=bench.layout.failed_run(0, WOOD, 1)
    )
    assert f"{crash.__name__}: RESOURCE_EXHAUSTED" in failed.training_log.read_text()
    assert "RESOURCE_EXHAUSTED" not in bench.archived_log()


def test_a_trainer_that_fails_is_charged_until_it_is_given_up(bench):
    bench.train_by(lambda _: 1)
    assert bench.run(*ALONE, "--max_retries=1") == 1
    assert bench.place.statuses() == {WOOD: "failed"}
    assert "code 1" in bench.place.lines()[WOOD]["why"]


@pytest.mark.parametrize("loaded", [False, True], ids=["before jax", "after jax"])
def test_a_run_takes_its_device_as_long_as_jax_has_none(bench, loaded):
    names = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "JAX_PLATFORMS", "PATH")
    for name in names:
        bench.monkeypatch.setenv(name, os.environ["PATH"] if name == "PATH" else "before")
    bench.monkeypatch.setitem(sys.modules, "jax", sys)
    if not loaded:
        bench.monkeypatch.delitem(sys.modules, "jax")
    seen, path = {}, os.environ["PATH"]
    bench.train_by(lambda _: seen.update(os.environ) or 0)
    env = {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "PATH": "/other"}
    InProcessLauncher().launch(dataclasses.replace(bench.job(), env=env))
    found = [seen[name] for name in names]
    taken = ["before", "before"] if loaded else ["1", "PCI_BUS_ID"]
    assert found == [*taken, "before", path]


def test_a_run_takes_its_cpus(bench):
    before = os.sched_getaffinity(0)
    seen = []
    bench.train_by(lambda _: seen.append(os.sched_getaffinity(0)) or 0)
    try:
        InProcessLauncher().launch(dataclasses.replace(bench.job(), cpus=(min(before),)))
    finally:
        os.sched_setaffinity(0, before)
    assert seen == [{min(before)}]


def test_the_trainers_table_is_the_only_live_one(bench):
    terminal = Console(file=io.StringIO(), force_terminal=True, record=True, width=140)
    bench.monkeypatch.setattr(console, "ERRORS", terminal)
    bench.monkeypatch.setattr(status, "Live", never)
    assert bench.run(*ALONE) == 0
    assert "1 completed" in terminal.export_text(), "the last table is shown"


def test_a_log_on_a_full_disk_does_not_end_the_run(bench):
    job = bench.job()

    def trainer(argv):
        log = RunPaths(job.folder, 0).training_log
        log.unlink()
        log.symlink_to("/dev/full")
        return stand_in.main(list(argv))

    bench.train_by(trainer)
    launcher = InProcessLauncher()
    assert isinstance(launcher.poll(launcher.launch(job), job.folder), Finished)


def test_waiting_sleeps_unless_a_run_has_ended_here(bench):
    launcher = InProcessLauncher()
    began = time.monotonic()
    launcher.wait((), timeout_seconds=0.2)
    assert time.monotonic() - began >= 0.2
    handle = launcher.launch(bench.job())
    began = time.monotonic()
    launcher.wait((handle,), timeout_seconds=30.0)
    assert time.monotonic() - began < 10.0
