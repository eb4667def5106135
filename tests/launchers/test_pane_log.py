"""The log of a pane: written by a fork of the runner, through a pipe that loses its name."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from flowrl import storage
from flowrl.launchers import files, processes, spec
from tests.launchers.conftest import SLEEP, end_of, start_of, until

SAY = "print('said', flush=True)\n"
LONG = "import time\nprint('x' * 500_000 + 'end', flush=True)\n"


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def writers(log: Path) -> list[int]:
    """The processes that have a log open."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            names = [str(path.readlink()) for path in (folder / "fd").iterdir()]
        except OSError:
            continue
        if str(log) in names:
            found.append(int(folder.name))
    return found


@pytest.mark.tmux
def test_the_logs_writer_is_a_fork_of_the_runner_that_holds_nothing_of_the_run(tmux, make_job):
    job = make_job("print('said', flush=True)\n" + SLEEP)
    handle = tmux.launch(job)
    start = start_of(job)
    log = job.folder / "training.log"
    until(lambda: "said" in log.read_text())
    (writer,) = writers(log)
    assert parent_of(writer) == start.runner_pid
    assert os.getsid(writer) == writer
    assert writer not in processes.with_open_file(job.folder / "run.lock")
    assert not (job.folder / ".log.pipe").exists()
    tmux.cancel(handle, job.folder)
    end_of(tmux, handle, job)


@pytest.mark.tmux
def test_all_that_a_pane_shows_is_in_the_log_when_its_writer_has_ended(tmux, make_job):
    job = make_job(LONG)
    end_of(tmux, tmux.launch(job), job)
    log = job.folder / "training.log"
    until(lambda: log.read_text().rstrip().endswith("end"))
    tmux._tmux("kill-server")
    until(lambda: not writers(log))
    assert log.read_text().count("x") == 500_000


@pytest.mark.tmux
@pytest.mark.parametrize("lacking", ["cat", "pipes"])
def test_where_there_is_no_cat_or_pipe_a_python_of_its_own_writes_the_log(
    tmux, make_job, monkeypatch, lacking
):
    which = shutil.which
    if lacking == "cat":
        monkeypatch.setattr(shutil, "which", lambda name: None if name == "cat" else which(name))
    else:
        monkeypatch.setattr(os, "mkfifo", refuse)
    job = make_job(SAY)
    end_of(tmux, tmux.launch(job), job)
    until(lambda: "said" in (job.folder / "training.log").read_text())


@pytest.mark.tmux
def test_a_run_that_never_began_leaves_nobody_waiting_at_its_pipe(tmp_path):
    place = tmp_path / "run"
    place.mkdir()
    pipe = spec.make_log_pipe(place)
    assert pipe is not None
    with subprocess.Popen(["/bin/sh", "-c", f"exec cat >{pipe}"], stdin=subprocess.PIPE) as cat:
        assert cat.stdin is not None
        cat.stdin.close()
        with pytest.raises(subprocess.TimeoutExpired):
            cat.wait(timeout=0.2)
        until(lambda: storage.remove_pipe(pipe) or cat.poll() is not None)
    assert not pipe.exists()


def test_only_a_pipe_is_removed_as_one(tmp_path):
    file = tmp_path / ".log.pipe"
    file.write_text("a trainer's")
    storage.remove_pipe(file)
    assert file.exists()
    storage.make_pipe(file)
    storage.remove_pipe(file)
    assert not file.exists()
    storage.remove_pipe(file)


def test_a_launch_that_is_given_up_takes_its_pipe_away(make_job):
    job = make_job(SLEEP)
    files.prepare(job, grace_seconds=1.0)
    assert spec.make_log_pipe(job.folder) is not None
    files.withdraw(job)
    assert not (job.folder / ".log.pipe").exists()


def refuse(*_):
    raise OSError(1, "Operation not permitted")
