from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flowrl.launchers import process, run_status
from flowrl.launchers.base import ExitCause, Handle, Job, Outcome
from flowrl.launchers.launcher import Launcher
from flowrl.launchers.local import LocalLauncher
from flowrl.launchers.tmux import TmuxLauncher
from tests.waiting import limit, until

# A trainer in miniature: real process, standard library alone, so that it starts in 10 ms.
SUCCEED = """
import json
json.dump({"format": 1, "run_id": %r, "frames": 3, "success_rate": 1.0, "step_success": [1.0],
  "mean_episode_length": 2.0, "updates": 1, "wall_seconds": 0.1, "stopped_early": False,
  "experts": [{"expert": 0, "acted": 3, "sha256": "00", "content": "00", "shapes": {"a": [1]}}]},
  open("result.json", "w"))
"""
READY = "import pathlib; pathlib.Path('ready').write_text('x')\n"
SLEEP = READY + "import time; time.sleep(600)\n"
STUBBORN = (
    "import signal\n"
    "for n in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT): signal.signal(n, signal.SIG_IGN)\n"
) + SLEEP
SAVING = "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(85))\n"
# A trainer's source, and the cause, code and signal of its end.
ENDS = (
    pytest.param("raise SystemExit(3)", ExitCause.EXIT, 3, None, id="exit 3"),
    pytest.param("raise SystemExit(85)", ExitCause.STOPPED, 85, None, id="resumable"),
    pytest.param("raise SystemExit(130)", ExitCause.INTERRUPTED, 130, None, id="interrupted"),
    pytest.param("import os; os.kill(os.getpid(), 9)", ExitCause.SIGNAL, None, 9, id="killed"),
    pytest.param("import os; os.abort()", ExitCause.SIGNAL, None, 6, id="aborted"),
    pytest.param("import os; os.kill(os.getpid(), 15)", ExitCause.SIGNAL, None, 15, id="its TERM"),
)

MakeJob = Callable[..., Job]


def end_of(launcher: Launcher, handle: Handle, job: Job, *, seconds: float = 60.0) -> Outcome:
    """How a run ends, heard as the scheduler hears it."""
    deadline = time.monotonic() + limit(seconds)
    while (outcome := launcher.poll(handle, job.folder)) is None:
        assert time.monotonic() < deadline, "the run does not end"
        launcher.wait([handle], timeout_seconds=1.0)
    return outcome


def start_of(job: Job) -> run_status.StartRecord:
    """start.json, once the trainer of `SLEEP` or `STUBBORN` is ready and its pid is recorded."""
    until((job.folder / "ready").exists)

    def named() -> run_status.StartRecord | None:
        start = run_status.read_start(job.folder, job.run_id)
        return start if start is not None and start.job_pid is not None else None

    return until(named)


def trainer_of(job: Job) -> int:
    pid = start_of(job).job_pid
    assert pid is not None
    return pid


def signal_to(pid: int | None, number: int = signal.SIGKILL) -> None:
    """Send a signal to one process: pid 0 would be pytest's own group."""
    assert pid
    os.kill(pid, number)


@pytest.fixture
def make_job(tmp_path: Path) -> MakeJob:
    """Makes jobs, each in a folder of its own, that run Python source."""

    def make(source: str, *, name: str = "flowrl_e0_Wood", run_id: str = "e0.a1.x", **facts) -> Job:
        folder = tmp_path / f"{name}.{run_id}.{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        facts = {"env": {"PATH": os.defpath, "LANG": "C.UTF-8"}, "cwd": folder, **facts}
        facts.setdefault("results", ("result.json",))
        argv = facts.pop("argv", ())
        words = (sys.executable, "-I", "-S", "-c", source, *argv)
        return Job(name=name, run_id=run_id, argv=words, folder=folder, **facts)

    return make


@pytest.fixture
def server_folder(tmp_path_factory, monkeypatch) -> Iterator[Path]:
    """Where tmux servers put their sockets: none of them is the user's; all end with the test."""
    folder = tmp_path_factory.mktemp("tmux")
    monkeypatch.setenv("TMUX_TMPDIR", str(folder))
    monkeypatch.setenv("HOME", str(folder))  # no ~/.tmux.conf
    monkeypatch.delenv("TMUX", raising=False)
    yield folder
    launcher = TmuxLauncher("test")
    for pane in [pane for pane in launcher.server.panes() if not pane.dead]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pane.pid, signal.SIGKILL)
    launcher.server.run("kill-server")


@pytest.fixture
def tmux(server_folder: Path) -> TmuxLauncher:
    return TmuxLauncher("test", grace_seconds=10.0)


@pytest.fixture
def local() -> Iterator[LocalLauncher]:
    launcher = LocalLauncher(grace_seconds=10.0)
    yield launcher
    for child in launcher._children:
        child.kill()
    launcher._reap()


TMUX = pytest.mark.tmux


@pytest.fixture(
    params=[
        *("local", pytest.param("tmux", marks=TMUX)),
        *("shared local", pytest.param("shared tmux", marks=TMUX)),
    ]
)
def launcher(request) -> Launcher:
    """Either launcher, also in a shared folder: what is tested with it is their common contract."""
    _, shared, name = request.param.rpartition("shared ")
    launcher = request.getfixturevalue(name)
    launcher.shared_folder = bool(shared)
    return launcher


@pytest.fixture(autouse=True)
def nothing_survives(tmp_path: Path) -> Iterator[None]:
    """Whatever a test leaves alive is killed, by the lock that every process of a run holds."""
    yield
    for lock in tmp_path.rglob("run.lock"):
        for pid in process.with_open_file(lock):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
