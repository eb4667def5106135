"""What the machine does to a daemon: network folders, clocks that jump, logs on a full disk."""

from __future__ import annotations

import os
import resource
import sys
from dataclasses import replace

import pytest

from flowrl import storage
from flowrl.errors import EXIT_BUSY, ConfigError
from flowrl.launchers.base import ExitCause, Finished, Job
from flowrl.launchers.local import LocalLauncher
from flowrl.parallel import health
from flowrl.parallel.events import Verb
from flowrl.parallel.health import RunLimits
from flowrl.parallel.requests import Inbox, send_request
from flowrl.parallel.scheduler import SkillScheduler
from flowrl.paths import GraphPaths
from tests import machine
from tests.launchers.conftest import SUCCEED, end_of, local, make_job, nothing_survives, until  # noqa: F401
from tests.parallel.making import TABLE, WOOD
from tests.parallel.scheduling import JobsBackend, exited, lines, words
from tests.parallel.stand_in_story import Place, ended

DAY = 86_400.0


SHARED = "nfs nfs4 cifs 9p virtiofs ceph lustre beegfs gpfs fuse fuse.sshfs fuse.juicefs newfs"
LOCAL = "ext4 xfs btrfs overlay tmpfs fuseblk"


@pytest.mark.parametrize("kind", [*SHARED.split(), *LOCAL.split()])
def test_a_folder_that_two_hosts_may_share_is_refused(start, tmp_path, monkeypatch, kind):
    device = tmp_path.stat().st_dev
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "1 0 999:1 / / rw - ext4 a rw\n"
        f"2 1 {os.major(device)}:{os.minor(device)} / /a\\040b rw x:1 - {kind} host:/x rw\n"
    )
    monkeypatch.setattr(health, "_MOUNTS", mounts)
    scheduler = start()
    if kind in LOCAL.split():
        scheduler.add_skill("A")
        return
    with pytest.raises(ConfigError, match=f"is on {kind},.*choose a --graph_path on a local disk"):
        scheduler.add_skill("A")
    assert not scheduler.graph_paths.scheduler_state.exists()


@pytest.mark.parametrize("jump", [-3650 * DAY, -DAY, DAY, 3650 * DAY], ids=lambda jump: f"{jump:g}")
def test_a_clock_that_jumps_neither_loses_a_run_nor_delays_a_retry_for_days(
    start, world, clock, jump
):
    scheduler = start(retry_backoff=5.0)
    for name in ("Failing", "Running", "Last"):
        scheduler.add_skill(name, {}, ["Failing", "Running"] if name == "Last" else [])
    scheduler.tick()
    world.end("Failing", exited(ExitCause.EXIT, code=1))
    scheduler.tick()
    clock.pass_seconds(jump)
    clock.pass_seconds(30)
    scheduler.tick()
    assert words(scheduler) == {"Failing": "running", "Running": "running", "Last": "waiting"}
    world.end("Failing")
    world.end("Running")
    scheduler.tick()
    world.end("Last")
    scheduler.tick()
    assert scheduler.state.complete
    assert len(world.ledger) == len(set(world.ledger)) == 3
    assert scheduler.state.entries["Running"].status.wall_seconds == 2.0


def test_a_trainer_whose_clock_jumps_is_not_taken_for_silent(tmp_path):
    now, progress = [0.0], tmp_path / "progress.json"
    limits = RunLimits(silent_seconds=10.0, run_seconds=None, monotonic=lambda: now[0])
    for times in (2e9, 0, 4e9, 1e9):  # of a file that is written every nine seconds
        progress.write_text("{}")
        os.utime(progress, (times, times))
        assert not limits.is_silent("run", progress)
        now[0] += 9.0
        assert not limits.is_silent("run", progress)
    now[0] += 2.0
    assert limits.is_silent("run", progress)


@pytest.fixture
def small_disk(tmp_path):
    with machine.small_disk(tmp_path / "disk", "256k") as folder:
        yield folder


def test_a_log_that_fills_the_disk_stops_no_trainer(small_disk, local, make_job, tmp_path):  # noqa: F811
    """The trainer is through while the disk is full; its end is written once there is room."""
    through, room = tmp_path / "through", tmp_path / "room"
    flood = "import os, time\nfor _ in range(2000): os.write(1, b'x' * 999 + b'\\n')\n"
    wait = (
        f"open({str(through)!r}, 'w').close()\n"
        f"while not os.path.exists({str(room)!r}): time.sleep(0.01)\n"
    )
    job = replace(make_job(flood + wait + SUCCEED % "e0.a1.x"), folder=small_disk, cwd=small_disk)
    (small_disk / "ballast").write_bytes(b"x" * 100_000)
    handle = local.launch(job)
    until(through.exists)
    assert os.statvfs(small_disk).f_bavail == 0
    (small_disk / "ballast").unlink()
    room.touch()
    assert isinstance(end_of(local, handle, job), Finished)


def test_a_trainer_that_cannot_import_has_failed_with_the_last_line_of_its_log(
    tmp_path, monkeypatch
):
    assert health.SETTLE_SECONDS == 0.1
    monkeypatch.setattr(health, "SETTLE_SECONDS", 1.0)

    def prepare(task):
        folder = storage.make_dir(tmp_path / f"a{task.attempt}")
        return Job(
            name="flowrl_e0_A",
            run_id=f"e0.a{task.attempt}.00",
            argv=(sys.executable, "-I", "-S", "-c", "import no_such_module"),
            env={"PATH": os.defpath},
            cwd=folder,
            folder=folder,
        )

    flags = {"max_retries": 0, "scheduler_poll_interval": 0.2}
    scheduler = SkillScheduler(tmp_path / "graph", launcher=LocalLauncher(), **flags)
    scheduler.set_callbacks(backend=JobsBackend(prepare))
    with scheduler:
        scheduler.add_skill("A")
        scheduler.run()
        why = lines(scheduler)["A"]["why"]
    assert "exit 1" in why
    assert "No module named 'no_such_module'" in why


def test_a_graph_that_is_moved_while_it_trains_goes_on_in_its_new_place(tmp_path):
    """The daemon stops writing; the run that lived in the old place counts for nothing there."""
    place = Place(tmp_path)
    place.order({WOOD: {"gate": "gate"}})
    flags = ("--launcher=local", "--sandbox=none", f"--target_skill={TABLE}")
    flags += ("--retry_backoff=0.05", "--scheduler_poll_interval=0.5")
    daemon = place.start(*flags)
    until(lambda: place.lines().get(WOOD, {}).get("handle"), seconds=60)
    old = place.graph_paths.root
    place.graph_paths = GraphPaths(old.rename(tmp_path / "moved"))
    code, said = ended(daemon)
    assert code == EXIT_BUSY
    assert "daemon.lock was deleted or replaced" in said
    place.open("gate")
    assert place.run(*flags)[0] == 0
    assert set(place.statuses().values()) == {"completed"}
    assert len(place.merged()) == len(set(place.merged())) == len(place.experts()) == 2
    assert not (old / "scheduler_state.json").exists()
    assert not (old / "checkpoints").exists()


def test_a_daemon_without_descriptors_takes_requests_later(start, world):
    scheduler = start()
    scheduler.add_skill("A")
    send_request(scheduler.graph_paths, Verb.PAUSE, "A")
    inbox = Inbox(scheduler.graph_paths)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        starved = (inbox.take(), inbox.waiting)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert starved == ([], False)
    assert [request.verb for request in inbox.take()] == [Verb.PAUSE]
    scheduler.tick()
    assert words(scheduler) == {"A": "held"}
