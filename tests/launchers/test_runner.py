"""The two stand-alone scripts: the runner and the log that cannot fill a disk."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from flowrl.launchers import capped_log, files, lean_json, runner, trainer_process
from flowrl.launchers.job import Exited, Why
from flowrl.launchers.local import LocalLauncher
from tests.launchers.conftest import SLEEP, end_of, start_of, trainer_of, until


def run_log(path: Path, text: bytes, cap: int, **facts) -> None:
    words = [sys.executable, "-I", "-S", str(files.CAPPED_LOG), str(path), str(cap)]
    subprocess.run(words, input=text, check=True, timeout=30, **facts)


def test_a_second_runner_of_a_folder_does_nothing(local, make_job):
    job = make_job(SLEEP)
    handle = local.launch(job)
    trainer = trainer_of(job)
    words = [sys.executable, "-I", "-S", str(files.RUNNER), str(job.folder / "spec.json")]
    second = subprocess.run(words, check=False, capture_output=True, text=True, timeout=30)
    assert second.returncode == runner.EXIT_BUSY
    assert "another process of run e0.a1.x is alive" in second.stderr
    assert trainer_of(job) == trainer
    assert local.poll(handle, job.folder) is None


@pytest.mark.parametrize(("source", "code"), [("raise SystemExit(3)", 3), (SLEEP, 128 + 9)])
def test_the_runner_exits_as_its_trainer_did(make_job, source, code):
    job = make_job(source)
    files.prepare(job, grace_seconds=1.0)
    words = [sys.executable, "-I", "-S", str(files.RUNNER), str(job.folder / "spec.json")]
    process = subprocess.Popen(words)
    if source == SLEEP:
        os.kill(trainer_of(job), signal.SIGKILL)
    assert process.wait(timeout=30) == code


def test_a_hangup_reaches_the_trainer_as_term(local, make_job):
    told = "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(85))\n"
    job = make_job(told + SLEEP)
    handle = local.launch(job)
    os.kill(start_of(job).runner_pid, signal.SIGHUP)
    end_of(local, handle, job)
    record = json.loads((job.folder / "exit.json").read_text())
    assert (record["code"], record["asked_by"]) == (85, ["hup"])


def test_a_server_that_does_not_answer_stops_nobody(monkeypatch, tmp_path, capfd):
    monkeypatch.setenv("TMUX", f"{tmp_path}/a,b,1234,0")
    assert runner.connect_to_server() is None
    assert f"{tmp_path}/a,b does not answer" in capfd.readouterr().err
    monkeypatch.delenv("TMUX")
    assert runner.connect_to_server() is None
    assert capfd.readouterr().err == ""


def test_a_full_disk_is_waited_for(monkeypatch, tmp_path):
    tries = []

    def write_record(path, record):
        tries.append(path)
        if len(tries) < 3:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(runner, "write_record", write_record)
    monkeypatch.setattr(runner, "WRITE_PAUSE_SECONDS", 0.0)
    assert runner.finish({"run_id": "r"}, str(tmp_path), code=4) == 4
    assert tries == [str(tmp_path / "exit.json")] * 3


SPEC = {"run_id": "r", "argv": ["x"], "env": {"MY_TOKEN": "canary-canary"}}
FORGOTTEN = {**SPEC, "env": {}}


def test_the_environment_is_overwritten_where_it_is(tmp_path):
    path = tmp_path / "spec.json"
    path.write_text(json.dumps(SPEC, indent=2))
    before = path.stat()
    runner.forget_environment(SPEC, str(tmp_path))
    assert (path.stat().st_ino, path.stat().st_size) == (before.st_ino, before.st_size)
    assert json.loads(path.read_text()) == FORGOTTEN
    assert lean_json.loads(path.read_text()) == FORGOTTEN


@pytest.mark.parametrize("planted", ["hard link", "link", "pipe", "shorter", "folder"])
def test_what_a_trainer_plants_as_the_spec_is_not_written_into(tmp_path, planted):
    path, other = tmp_path / "spec.json", tmp_path / "other"
    other.write_text(json.dumps({**SPEC, "of": "somebody"}, indent=2))
    before = other.read_text()
    match planted:
        case "hard link":
            os.link(other, path)
        case "link":
            path.symlink_to(other)
        case "pipe":
            os.mkfifo(path)
        case "shorter":
            path.write_text("{}")
        case _:
            path.mkdir()
    runner.forget_environment(SPEC, str(tmp_path))
    assert other.read_text() == before
    if path.is_file():
        assert json.loads(path.read_text()) == FORGOTTEN


def test_the_file_of_the_end_is_made_ahead(local, make_job):
    job = make_job(SLEEP)
    handle = local.launch(job)
    start_of(job)
    part = job.folder / ".exit.json.part"
    inode = until(part.exists) and part.stat().st_ino
    local.cancel(handle, job.folder)
    end_of(local, handle, job)
    assert (job.folder / "exit.json").stat().st_ino == inode


def test_a_killed_runner_leaves_nothing_half_written(local, make_job):
    job = make_job(SLEEP)
    handle = local.launch(job)
    start = start_of(job)
    until((job.folder / ".exit.json.part").exists)
    for pid in (start.runner_pid, start.trainer_pid):
        os.kill(pid, signal.SIGKILL)
    end_of(local, handle, job)
    assert not list(job.folder.glob(".*"))


@pytest.mark.parametrize(
    ("text", "count"),
    [("low 0\nhigh 2\noom 1\noom_kill 3\n", 3), ("under_oom 0\noom_kill 1\n", 1)],
    ids=["version 2", "version 1"],
)
def test_kills_are_counted_in_our_own_cgroup(monkeypatch, tmp_path, text, count):
    (tmp_path / "events").write_text(text)
    monkeypatch.setattr(
        trainer_process, "memory_event_files", lambda: ["/none", f"{tmp_path}/events"]
    )
    assert trainer_process.oom_kills() == count


@contextmanager
def small_cgroup(megabytes: int):
    """A cgroup below ours with little memory; skips where we may not make one."""
    own = [
        Path(path).parent for path in trainer_process.memory_event_files() if Path(path).exists()
    ]
    if not own:
        pytest.skip("no memory cgroup")
    group = own[0] / f"flowrl_test_{os.getpid()}"
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
        for pid in (start.runner_pid, start.trainer_pid):
            (group / "cgroup.procs").write_text(str(pid))
        (job.folder / "go").touch()
        outcome = end_of(launcher, handle, job)
    assert isinstance(outcome, Exited)
    assert outcome.why is Why.OOM


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
    assert cap // 2 - capped_log.CHUNK_BYTES <= len(kept) <= cap
    assert text.endswith(kept)


def test_a_full_disk_does_not_block_who_writes():
    run_log(Path("/dev/full"), b"x" * 10**6, 10**9)


def test_a_log_that_cannot_be_opened_does_not_block_who_writes(tmp_path):
    run_log(tmp_path / "missing" / "training.log", b"x" * 10**6, 10**9)


@pytest.mark.parametrize(
    "megabytes", [40, pytest.param(1000, marks=pytest.mark.slow)], ids=["some", "a gigabyte"]
)
def test_a_flood_through_a_launcher_fills_no_disk(local, make_job, monkeypatch, megabytes):
    monkeypatch.setattr(files, "CAPPED_LOG", small_log(make_job))
    flood = f"import sys\nfor _ in range({megabytes}): sys.stdout.write('flood 789' * 116509)\n"
    job = make_job(flood + "print('the end', flush=True)", env={"MY_TOKEN": "canary-canary"})
    outcome = end_of(local, local.launch(job), job, seconds=120.0)
    assert isinstance(outcome, Exited)
    assert outcome.code == 0
    log = job.folder / "training.log"
    until(lambda: log.read_bytes().endswith(b"the end\n"))
    kept = sum(path.stat().st_size for path in job.folder.glob("training.log*"))
    assert 2**20 <= kept <= 2**22


def small_log(make_job) -> Path:
    """The log's writer with a cap of 4 MiB."""
    program = make_job("", name="writer").folder / "capped_log.py"
    text = files.CAPPED_LOG.read_text().replace("CAP_BYTES = 64 * 2**20", "CAP_BYTES = 2**22")
    assert "CAP_BYTES = 2**22" in text
    program.write_text(text)
    return program


@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, -2.5, 1e-300, None, True, False], '木\n"': {"b": "\x00\u2028😀"}},
        [],
        {},
        "x",
        10**30,
    ],
    ids=str,
)
def test_lean_json_is_json(value):
    assert lean_json.dumps(value) == json.dumps(value)
    assert lean_json.loads(f" {json.dumps(value, indent=1, ensure_ascii=False)}\n") == value


@pytest.mark.parametrize("text", ["", "{", "{} {}", "nul", '{"a": 1,}', "'a'", '{"a": "\n"}'])
def test_what_is_no_json_is_refused(text):
    with pytest.raises(ValueError, match=r"."):
        lean_json.loads(text)


def test_programs_in_the_pane_import_nothing_that_takes_long():
    for program in (files.RUNNER, files.CAPPED_LOG):
        code = f"import sys; sys.argv[1:] = []; sys.path.insert(0, {str(program.parent)!r})\n"
        code += f"sys.path.append({str(program.parents[2])!r})\n"
        code += f"import {program.stem}\nprint(*sys.modules)"
        words = [sys.executable, "-I", "-S", "-c", code]
        done = subprocess.run(words, check=True, capture_output=True, text=True)
        assert not {"json", "re", "enum", "signal", "socket", "typing"} & set(done.stdout.split())
