"""The two stand-alone scripts: the runner and the log that cannot fill a disk."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from flowrl.launchers import log_writer, process, run_status, runner
from flowrl.launchers.base import ExitCause, Exited, Finished
from flowrl.launchers.local import LocalLauncher
from flowrl.storage import locks
from tests.launchers.confining import confined
from tests.launchers.conftest import SLEEP, end_of, start_of, trainer_of, until


def run_log(path: Path, text: bytes, cap: int, **facts) -> None:
    words = [sys.executable, "-I", "-S", str(run_status.LOG_WRITER), str(path), str(cap)]
    subprocess.run(words, input=text, check=True, timeout=30, **facts)


def test_a_look_at_the_lock_keeps_no_runner_from_taking_it(tmp_path, monkeypatch):
    path = tmp_path / "run.lock"
    path.touch()
    with path.open() as look, monkeypatch.context() as waiting:
        fcntl.flock(look, fcntl.LOCK_SH)
        waiting.setattr(runner.time, "sleep", lambda _: look.close())
        assert runner.take_lock(str(path))
    assert locks.is_held(path)
    assert not runner.take_lock(str(path))


def test_a_second_runner_of_a_folder_does_nothing(local, make_job):
    job = make_job(SLEEP)
    handle = local.launch(job)
    trainer = trainer_of(job)
    words = [sys.executable, "-I", "-S", str(run_status.RUNNER), str(job.folder / "spec.json")]
    second = subprocess.run(words, check=False, capture_output=True, text=True, timeout=30)
    assert second.returncode == runner.EXIT_BUSY
    assert "another process of run e0.a1.x is alive" in second.stderr
    assert trainer_of(job) == trainer
    assert local.poll(handle, job.folder) is None


@pytest.mark.parametrize(
    ("source", "code"), [("raise SystemExit(3)", 3), ("raise SystemExit(85)", 0), (SLEEP, 128 + 9)]
)
def test_the_runner_exits_as_its_trainer_did(make_job, source, code):
    job = make_job(source)
    run_status.prepare(job, grace_seconds=1.0)
    words = [sys.executable, "-I", "-S", str(run_status.RUNNER), str(job.folder / "spec.json")]
    child = subprocess.Popen(words)
    if source == SLEEP:
        os.kill(trainer_of(job), signal.SIGKILL)
    assert child.wait(timeout=30) == code


def test_a_hangup_reaches_the_trainer_as_term(local, make_job):
    told = "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(85))\n"
    job = make_job(told + SLEEP)
    handle = local.launch(job)
    os.kill(start_of(job).runner_pid, signal.SIGHUP)
    end_of(local, handle, job)
    record = json.loads((job.folder / "exit.json").read_text())
    assert (record["code"], record["received"]) == (85, ["SIGHUP"])


def test_a_server_that_does_not_answer_stops_nobody(monkeypatch, tmp_path, capfd):
    monkeypatch.setenv("TMUX", f"{tmp_path}/a,b,1234,0")
    assert runner.connect_to_server() is None
    assert f"{tmp_path}/a,b does not answer" in capfd.readouterr().err
    monkeypatch.delenv("TMUX")
    assert runner.connect_to_server() is None
    assert capfd.readouterr().err == ""


def test_a_full_disk_is_waited_for(monkeypatch, tmp_path):
    tries = []

    def write_record(folder, name, record):
        tries.append(name)
        if len(tries) < 3:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(runner, "write_record", write_record)
    monkeypatch.setattr(runner, "WRITE_PAUSE_SECONDS", 0.0)
    assert runner.finish({"run_id": "r"}, str(tmp_path), code=4) == 4
    assert tries == ["exit.json"] * 3


@pytest.mark.parametrize("planted", ["hard link", "link", "pipe", "folder"])
def test_what_a_job_plants_as_a_record_is_replaced_and_not_written_into(tmp_path, planted):
    path, other = tmp_path / ".exit.json.part", tmp_path / "other"
    other.write_text("of somebody")
    match planted:
        case "hard link":
            path.hardlink_to(other)
        case "link":
            path.symlink_to(other)
        case "pipe":
            os.mkfifo(path)
        case _:
            path.mkdir()
    with suppress(IsADirectoryError):
        runner.write_record(str(tmp_path), "exit.json", {"run_id": "r"})
        assert json.loads((tmp_path / "exit.json").read_text()) == {"run_id": "r"}
    assert other.read_text() == "of somebody"


def test_a_killed_runner_leaves_nothing_half_written(local, make_job):
    job = make_job(SLEEP)
    handle = local.launch(job)
    start = start_of(job)
    (job.folder / ".exit.json.part").touch()
    for pid in (start.runner_pid, start.job_pid):
        os.kill(pid, signal.SIGKILL)
    end_of(local, handle, job)
    assert not list(job.folder.glob(".*"))


def confinable(job):
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    return confined(job)


@contextmanager
def small_cgroup(megabytes: int):
    """A cgroup below ours with little memory; skips where we may not make one."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    groups = {names: path for _, names, path in (line.split(":", 2) for line in lines)}
    place = f"/memory{groups['memory']}" if "memory" in groups else groups.get("", "")
    group = Path(f"/sys/fs/cgroup{place}", f"flowrl_test_{os.getpid()}")
    names = ("memory.max", "memory.limit_in_bytes")
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup of our own: {error}")
    try:
        limit = next((group / name for name in names if (group / name).exists()), None)
        if limit is None:
            pytest.skip("the memory controller is not passed on")
        limit.write_text(str(megabytes * 2**20))
        yield group
    finally:
        until(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()


def test_a_trainer_that_runs_out_of_memory_is_told_apart(make_job):
    launcher = LocalLauncher()
    greedy = (
        "import time\nwhile not __import__('os').path.exists('go'): time.sleep(0.01)\n"
        "b'x' * 400_000_000\ntime.sleep(600)\n"
    )
    job = make_job("open('ready', 'w').close()\n" + greedy)
    with small_cgroup(50) as group:
        handle = launcher.launch(job)
        start = start_of(job)
        for pid in (start.runner_pid, start.job_pid):
            (group / "cgroup.procs").write_text(str(pid))
        (job.folder / "go").touch()
        outcome = end_of(launcher, handle, job)
    assert isinstance(outcome, Exited)
    assert outcome.cause is ExitCause.OOM


@pytest.mark.parametrize(
    ("limits", "source", "cause"),
    [
        ({"run_memory": 100_000_000}, "x = b'x' * 300_000_000\n", ExitCause.OOM),
        ({"run_disk": 1_000_000}, "for n in '123': open(n, 'wb').write(b'x' * 900_000)\n", None),
        ({"run_processes": 8}, "import os\nfor _ in range(4): os.fork()\n", None),
    ],
    ids=["memory", "disk", "processes"],
)
@pytest.mark.parametrize("how", [confinable, lambda job: job], ids=["confined", "plain"])
def test_a_run_beyond_its_limits_is_killed_and_says_so(local, make_job, limits, source, cause, how):
    job = how(make_job(source + SLEEP, limits=limits))
    outcome = end_of(local, local.launch(job), job)
    assert isinstance(outcome, Exited)
    assert outcome.cause is (cause or ExitCause.SIGNAL)
    assert f"more than --{next(iter(limits))} {next(iter(limits.values())):,}" in outcome.detail
    until(lambda: not run_status.lock_held(job.folder))


def test_a_run_within_its_limits_is_left_alone(local, make_job):
    limits = {"run_memory": 10**9, "run_disk": 10**7, "run_processes": 9}
    job = make_job("import time; time.sleep(1.5)", limits=limits)
    assert isinstance(end_of(local, local.launch(job), job), Finished)


def test_a_short_log_is_kept_whole(tmp_path):
    log = tmp_path / "training.log"
    run_log(log, b"one\n", 1000)
    run_log(log, b"two\n", 1000)
    assert log.read_bytes() == b"one\ntwo\n"
    assert log.stat().st_mode & 0o777 == 0o600


def test_a_flood_keeps_its_end_within_the_cap(tmp_path):
    log, cap = tmp_path / "training.log", 2**20
    text = b"".join(b"%09d\n" % number for number in range(500_000))
    run_log(log, text, cap)
    kept = (tmp_path / "training.log.1").read_bytes() + log.read_bytes()
    assert cap // 2 - log_writer.CHUNK_BYTES <= len(kept) <= cap
    assert text.endswith(kept)


def test_a_full_disk_does_not_block_who_writes():
    run_log(Path("/dev/full"), b"x" * 10**6, 10**9)


def test_a_log_that_cannot_be_opened_does_not_block_who_writes(tmp_path):
    run_log(tmp_path / "missing" / "training.log", b"x" * 10**6, 10**9)


@pytest.mark.parametrize(
    "megabytes", [40, pytest.param(1000, marks=pytest.mark.slow)], ids=["some", "a gigabyte"]
)
def test_a_flood_through_a_launcher_fills_no_disk(local, make_job, monkeypatch, megabytes):
    monkeypatch.setattr("flowrl.launchers.run_status.LOG_WRITER", small_log(make_job))
    flood = f"import sys\nfor _ in range({megabytes}): sys.stdout.write('flood 789' * 116509)\n"
    job = make_job(flood + "print('the end', flush=True)", env={"MY_TOKEN": "canary-canary"})
    outcome = end_of(local, local.launch(job), job, seconds=120.0)
    assert isinstance(outcome, Finished)
    log = job.folder / "training.log"
    until(lambda: not process.of_script(run_status.LOG_WRITER, str(log)))
    assert log.read_bytes().endswith(b"the end\n")
    kept = sum(path.stat().st_size for path in job.folder.glob("training.log*"))
    assert 2**20 <= kept <= 2**22


def small_log(make_job) -> Path:
    """The log's writer with a cap of 4 MiB."""
    program = make_job("", name="writer").folder / "log_writer.py"
    text = run_status.LOG_WRITER.read_text().replace("CAP_BYTES = 64 * 2**20", "CAP_BYTES = 2**22")
    assert "CAP_BYTES = 2**22" in text
    program.write_text(text)
    return program
