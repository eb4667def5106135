"""Hosts that share a folder, and an engine that starts jobs on them.

As a program, `python -m tests.chaos.two_hosts FLAGS`, it is the scheduler of `tests.chaos.story`
with that engine in place of Slurm. All times of claims and leases are a twentieth or a tenth of
flowrl's own, in the scheduler and in a copy of the runner.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from flowrl import bottomup_parallel, storage
from flowrl.config import LaunchConfig
from flowrl.launchers import remote, run_status
from flowrl.launchers.base import ExitCause, Job
from flowrl.launchers.launcher import Launcher
from flowrl.launchers.local import LocalLauncher
from flowrl.launchers.remote import EngineJob, EngineLauncher, UnansweredError, runner_line
from flowrl.parallel import health, shared_claim, start, training
from tests.chaos import story
from tests.chaos.story import TellingScheduler
from tests.machine import HOST
from tests.parallel.stand_in_story import ROOT, StandInBackend

BEAT_SECONDS, LOST_SECONDS = 0.5, 6.0
INIT = Path(__file__).with_name("host_init.py")
ENGINE, RUNNER = "CHAOS_ENGINE", "runner.py"


class HostsLauncher(EngineLauncher):
    """The Launcher of an engine whose queue is a folder that the hosts' first processes look at."""

    engine = "slurm"  # the name that flowrl knows engines by

    def __init__(self, folder: Path, **seconds: float) -> None:
        super().__init__(**seconds)
        self._queue = folder

    def submit(self, job: Job, launch: str) -> str:
        self._refuse_silence()
        part = self._queue / f"{launch}.part"
        part.write_text(runner_line(job))
        part.rename(self._queue / f"{launch}.job")
        return launch

    def list_jobs(self) -> Mapping[str, EngineJob]:
        self._refuse_silence()
        return {path.stem: _job_of(path) for path in self._queue.iterdir()}

    def cancel(self, job: EngineJob) -> None:
        with contextlib.suppress(FileNotFoundError):
            (self._queue / f"{job.id}.job").rename(self._queue / f"{job.id}.done")

    def _refuse_silence(self) -> None:
        if (self._queue.parent / "silent").exists():
            raise UnansweredError("it was told not to answer")


def _job_of(path: Path) -> EngineJob:
    match path.suffix:
        case ".job":
            return EngineJob(id=path.stem, queued="no host is free", live=True)
        case ".lost":
            cause, detail = ExitCause.SERVER_KILLED, "its host is lost"
            return EngineJob(id=path.stem, host="its host", cause=cause, detail=detail)
        case ".done":
            return EngineJob(id=path.stem, host="its host", detail="it left no record")
    return EngineJob(id=path.stem, host=path.suffix[1:], live=path.suffix != ".part")


class Host:
    """A host: namespaces, a first process, and a mount of the shared folder of its own.

    Nothing but that folder and the engine's queue connects two hosts, so they have no networks.
    """

    def __init__(self, name: str, shared: Path, engine: Path) -> None:
        self.name, self.engine = name, engine
        words = (*HOST, sys.executable, "-I", "-S", str(INIT), name, str(shared), str(engine))
        self._outer = subprocess.Popen(words, stdin=subprocess.PIPE, text=True)
        self._starts = 0
        self._end: Path | None = None
        self.ends: list[int] = []
        self.cut = self.frozen = False

    def start(self, flags: tuple[str, ...], env: Mapping[str, str]) -> None:
        """Start a scheduler."""
        self._starts += 1
        folder = self.engine.parent
        self._end = folder / f"{self.name}.{self._outer.pid}.{self._starts}.end"
        argv = [sys.executable, "-m", "tests.chaos.two_hosts", *flags]
        env = {**env, ENGINE: str(self.engine), "PYTHONPATH": str(ROOT)}
        log = str(folder / f"{self.name}.log")
        self._order({"argv": argv, "env": env, "log": log, "end": str(self._end)})

    @property
    def has_ended(self) -> bool:
        """True if no scheduler is at work on it; notes how the last one ended."""
        if self._end and self._end.exists() and (code := self._end.read_text()):
            self.ends.append(int(code))
            self._end = None
        return self._end is None

    def pids(self, word: str = "") -> list[int]:
        """Return the processes on this host whose command line holds a word."""
        (inner, *_), found = process_children(self._outer.pid) or [0], []
        with contextlib.suppress(FileNotFoundError):
            place = os.readlink(f"/proc/{inner}/ns/pid")  # noqa: PTH115
            for folder in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError):
                    if os.readlink(folder / "ns/pid") == place:  # noqa: PTH115
                        line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                        found += [int(folder.name)] if word in line else []
        return found

    def send(self, number: signal.Signals, *words: str) -> int:
        """Send a signal to all processes with one of these words; returns how many there were."""
        pids = {pid for word in words for pid in self.pids(word)}
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return len(pids)

    def freeze(self) -> None:
        """Stop all processes, those that start meanwhile, too."""
        self.frozen = True
        for _ in range(3):
            self.send(signal.SIGSTOP, "")

    def thaw(self) -> None:
        self.frozen = False
        self.send(signal.SIGCONT, "")

    def hang_network(self) -> None:
        """Let all that is asked of the shared folder wait, as a hard mount of NFS does."""
        self.cut = True
        self.send(signal.SIGSTOP, "bindfs")

    def break_network(self) -> None:
        """Let all that is asked of the shared folder fail, until it is mounted again."""
        self.cut = True
        self.send(signal.SIGKILL, "bindfs")

    def mend_network(self) -> None:
        self.cut = False
        if not self.send(signal.SIGCONT, "bindfs -f"):
            self._order({})

    def kill(self) -> None:
        """Lose the host: its first process takes all others with it."""
        self._outer.kill()
        self._outer.communicate()

    def lose_jobs(self) -> None:
        """Have the engine find that the host does not answer."""
        for path in self.engine.glob(f"*.{self.name}"):
            with contextlib.suppress(FileNotFoundError):
                path.rename(path.with_suffix(".lost"))

    def _order(self, order: Mapping[str, object]) -> None:
        assert self._outer.stdin is not None
        self._outer.stdin.write(json.dumps(order) + "\n")
        self._outer.stdin.flush()


def process_children(pid: int) -> list[int]:
    """Return the children of a process."""
    with contextlib.suppress(OSError):
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    return []


def _open_launcher(config: LaunchConfig) -> Launcher:
    if config.launcher == "local":
        launcher = LocalLauncher(grace_seconds=story.GRACE_SECONDS)
        launcher.lost_after = LOST_SECONDS
        return launcher
    seconds = {"lost_after": LOST_SECONDS, "grace_seconds": story.GRACE_SECONDS}
    return HostsLauncher(Path(os.environ[ENGINE]), **seconds)


def _shorten() -> None:
    """Make all times those of this module."""
    shared_claim.BEAT_SECONDS = BEAT_SECONDS
    health.SharedClaim = partial(shared_claim.SharedClaim, lost_after=LOST_SECONDS)
    remote._STILL_SECONDS, remote.LISTED_SECONDS, remote._AGAIN_SECONDS = 2 * BEAT_SECONDS, 1.0, 0.1
    copy = Path(os.environ[ENGINE]).parent / RUNNER
    if not copy.exists():
        text = run_status.RUNNER.read_text()
        assert "BEAT_SECONDS = 5.0" in text
        text = text.replace("BEAT_SECONDS = 5.0", f"BEAT_SECONDS = {BEAT_SECONDS}")
        storage.write_atomic(copy, text)
    remote.RUNNER = run_status.RUNNER = copy


if __name__ == "__main__":
    _shorten()
    training.TrainingBackend = StandInBackend
    start.SkillScheduler = TellingScheduler
    start.open_launcher = _open_launcher
    sys.exit(bottomup_parallel.main())
