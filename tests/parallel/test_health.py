"""A full, broken or read-only disk pauses all that is started or merged, and nothing is lost."""

from __future__ import annotations

import errno
import os
import subprocess

import pytest

from flowrl import notices, storage
from flowrl.errors import LaunchError
from flowrl.launchers.base import Lost
from flowrl.parallel import health
from flowrl.parallel.scheduler import SkillScheduler
from flowrl.paths import GraphPaths, RunPaths
from flowrl.runs import progress_of
from tests import machine
from tests.parallel.scheduling import FakeBackend, FakeLauncher, lines, status, words
from tests.parallel.stand_in_story import Place, ended


@pytest.fixture
def small_disk(tmp_path):
    """It can be filled and made read-only."""
    with machine.small_disk(tmp_path / "disk", "1m") as folder:
        yield folder


@pytest.fixture
def on_disk(small_disk, world, clock):
    """A daemon in a graph on the small disk, with one skill running and one waiting for it."""
    launcher = FakeLauncher(world, on_wait=lambda: clock.pass_seconds(1))
    with SkillScheduler(small_disk / "graph", launcher=launcher, clock=clock) as scheduler:
        scheduler.set_callbacks(backend=FakeBackend(world))
        scheduler.add_skill("A")
        scheduler.add_skill("B", {}, ["A"])
        scheduler.tick()
        yield scheduler


def fill(folder):
    """Leave not a byte; answers the file to remove."""
    big = folder / "big"
    copied = subprocess.run(
        ["dd", "if=/dev/zero", f"of={big}", "bs=4k"], capture_output=True, text=True, check=False
    )
    assert "No space left" in copied.stderr
    return big


def test_a_full_disk_pauses_and_goes_on_by_itself(on_disk, small_disk, world, caplog, flowrl):
    """FAULTS 25 and 26."""
    before = on_disk.graph_paths.scheduler_state.read_bytes()
    big = fill(small_disk)
    world.end("A")
    for _ in range(3):
        on_disk.tick()
    assert not world.ledger, "nothing is merged"
    assert on_disk.graph_paths.scheduler_state.read_bytes() == before
    assert caplog.text.count("paused (disk)") == 1, "it is said once"
    assert "paused (disk)" in flowrl("status", on_disk.graph_paths.root).out, (
        "without a byte to note it in"
    )
    big.unlink()
    on_disk.tick()
    assert words(on_disk) == {"A": "completed", "B": "running"}
    assert lines(on_disk)["B"]["status"] == "running"
    assert len(world.ledger) == 1
    assert "goes on" in caplog.text


def test_a_read_only_remount_pauses_and_goes_on_by_itself(on_disk, small_disk, world, caplog):
    """FAULTS 30."""

    def remount(how):
        subprocess.run(["mount", "-o", f"remount,{how}", str(small_disk)], check=True)

    world.end("A")
    remount("ro")
    for _ in range(3):
        on_disk.tick()
    assert not world.ledger
    assert "paused (io)" in caplog.text
    assert "read-only" in str(health.disk_shortage(on_disk.graph_paths))
    remount("rw")
    on_disk.tick()
    assert words(on_disk) == {"A": "completed", "B": "running"}


def test_a_daemon_cannot_start_on_a_read_only_disk_and_says_so_in_a_line(small_disk):
    graph = storage.make_dir(small_disk / "graph")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    program = ["-m", "flowrl.bottomup_parallel", f"--graph_path={graph}", "--launcher=local"]
    done = subprocess.run(
        [os.sys.executable, *program], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2, done.stderr
    assert "Read-only file system" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_daemon_that_is_started_on_a_full_disk_waits_for_room(small_disk):
    place = Place(small_disk)
    big = fill(small_disk)
    daemon = place.start("--target_skill=Collect Wood", "--launcher=local")
    said: list[str] = []
    while "paused (disk)" not in "".join(said):
        said.append(daemon.stderr.readline())
        assert said[-1], said
    assert daemon.poll() is None
    big.unlink()
    code, rest = ended(daemon)
    assert code == 0, [*said, rest]
    assert place.statuses() == {"Collect Wood": "completed"}
    assert "paused" not in notices.read(place.graph_paths)


def test_a_notice_of_a_pause_goes_with_its_daemon_or_at_the_next_start(start, world):
    graph_paths = start("A").graph_paths
    notices.publish(graph_paths, "paused", "paused (disk): of a daemon that was killed")
    scheduler = start()
    scheduler.tick()
    assert notices.read(scheduler.graph_paths) == {}
    scheduler.disk._pause("disk", "it is full")
    assert "paused" in notices.read(scheduler.graph_paths)
    scheduler.close()
    assert notices.read(scheduler.graph_paths) == {}


def test_an_end_on_a_full_disk_charges_nothing(on_disk, small_disk, world):
    fill(small_disk)
    world.end("A", Lost("no trace"))
    on_disk.tick()
    assert on_disk.state.entries["A"].failures == 0


@pytest.mark.parametrize(
    ("number", "word"),
    [
        (errno.ENOSPC, "disk"),
        (errno.EDQUOT, "disk"),
        (errno.EIO, "io"),
        (errno.EROFS, "io"),
        (errno.ETIMEDOUT, "io"),
        (errno.ENOTCONN, "io"),
        (errno.EACCES, "io"),
    ],
)
def test_a_state_that_cannot_be_saved_pauses_whatever_the_reason(
    start, world, monkeypatch, caplog, number, word
):
    scheduler = start("A", "B")
    file = scheduler.state_file
    save = file.save

    def broken(state):
        raise OSError(number, os.strerror(number), "scheduler_state.json")

    monkeypatch.setattr(file, "save", broken)
    for _ in range(3):
        scheduler.tick()
    assert not any(run.launches for run in world.runs.values())
    assert caplog.text.count(f"paused ({word})") == 1
    assert f"paused ({word})" in notices.read(scheduler.graph_paths)["paused"]
    monkeypatch.setattr(file, "save", save)
    scheduler.tick()
    assert words(scheduler) == {"A": "running", "B": "running"}
    assert notices.read(scheduler.graph_paths) == {}


@pytest.mark.parametrize("verb", ["prepare", "launch", "merge"])
def test_an_act_that_meets_a_full_disk_pauses_all_until_a_probe_can_be_written(
    start, world, clock, monkeypatch, verb
):
    scheduler = start("A", max_retries=0)
    refused = LaunchError("spec.json cannot be written")
    refused.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    world.refusals[verb] = [refused if verb == "launch" else refused.__cause__]

    def full():
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(scheduler.disk, "_probe", full)
    scheduler.tick()
    if verb == "merge":
        world.end("A")
        scheduler.tick()
    scheduler.add_skill("B")
    clock.pass_seconds(3600)
    scheduler.tick()
    assert words(scheduler)["B"] == "waiting"
    assert not world.ledger
    assert "paused (disk)" in notices.read(scheduler.graph_paths)["paused"]
    scheduler.wait()
    assert scheduler.launcher.waits[-1] <= health.PROBE_SECONDS
    monkeypatch.undo()
    scheduler.tick()
    assert words(scheduler)["B"] == "running"
    assert words(scheduler)["A"] == ("completed" if verb == "merge" else "running")
    assert scheduler.state.entries["A"].failures == 0


def test_one_skills_own_file_that_may_not_be_written_pauses_nobody_else(start, world):
    scheduler = start("A", "B")
    world.refusals["prepare"] = [PermissionError(errno.EACCES, "Permission denied", "skill_0")]
    scheduler.tick()
    assert words(scheduler) == {"A": "waiting", "B": "running"}
    assert "Permission denied" in status(scheduler, "A").why
    assert notices.read(scheduler.graph_paths) == {}


def test_a_trainer_is_not_blamed_for_a_silence_that_a_full_disk_has_made(start, world, monkeypatch):
    scheduler = start("A", stall_timeout=1e-9)
    scheduler.tick()
    monkeypatch.setattr(health, "disk_shortage", lambda graph_paths: ("disk", "no room"))
    for _ in range(5):
        scheduler.tick()
    assert not status(scheduler, "A").stop_reason
    assert not world.of("A").asked_to_end
    monkeypatch.undo()
    for _ in range(3):
        scheduler.tick()
    assert status(scheduler, "A").stop_reason


def test_a_run_in_the_queue_of_an_engine_is_neither_silent_nor_late(start, world):
    scheduler = start("A", stall_timeout=1e-9, run_timeout=1e-9)
    world.queue = "Slurm: Priority"
    scheduler.tick()
    world.of("A").job.folder.mkdir(parents=True)
    for _ in range(5):
        scheduler.tick()
    assert not status(scheduler, "A").stop_reason
    told = progress_of(RunPaths(world.of("A").job.folder, 0), world.of("A").job.run_id)
    assert told is not None
    assert (told.phase, told.waits_for) == ("queued", "Slurm: Priority")
    world.queue = ""
    for _ in range(3):
        scheduler.tick()
    assert status(scheduler, "A").stop_reason


def test_a_folder_that_is_gone_is_no_shortage(tmp_path):
    assert health.disk_shortage(GraphPaths(tmp_path / "nowhere")) is None
