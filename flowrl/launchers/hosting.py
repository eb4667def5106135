"""The processes that fork runners, from the side of the launcher that asks them to."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flowrl.errors import LaunchError
from flowrl.launchers.job import MODULE_WORDS, Job
from flowrl.redaction import is_secret

HOST = Path(__file__).with_name("runner_host.py")
TRAINER_HOST = "flowrl.launchers.trainer_host"
ANSWER_SECONDS = 10.0
_ROOM_BYTES = 2**14  # for three paths of the greatest length that Linux knows
LOAD_SECONDS = 10.0  # that the first run waits for the trainers' host; it would load as much itself


class RunnerHost:
    """One such process, started when it is first needed, and anew when it has died."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = False
        self.able = True  # as far as is known

    def start(self, spec: Path, log: Path, env: Mapping[str, str]) -> int | None:
        """Start a runner and its log's writer; answers the runner's pid, None if it is not able.

        Raises:
          OSError: no process can be started.
          LaunchError: the host gives no answer; it may have started the runner.
        """
        if not self.able or not self._is_up():
            return None
        asked = {"spec": str(spec), "log": str(log), "env": dict(env)}
        told = self._ask(json.dumps(asked).encode() + b"\n")
        if "error" in told:
            raise OSError(told["error"])
        return told["pid"]

    def close(self) -> None:
        """End the host; what it has started goes on."""
        process, self._process, self._ready = self._process, None, False
        if process is None:
            return
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        process.kill()  # it holds nothing that a kill could tear
        process.wait()

    def _is_up(self) -> bool:
        """Whether there is one now that can do it."""
        if self._process is None or self._process.poll() is not None:
            if self._process is not None and not self._ready:
                self.able = False  # nor would the next one come so far
                return False
            self.close()
            self._process = self._opened()
        if not self._ready and self._has_spoken():
            self._ready = self.able = self._ask(b"")["able"]
            if not self.able:
                self.close()
        return self._ready

    def _opened(self) -> subprocess.Popen[bytes]:
        return _opened(["-I", "-S", str(HOST)], env={}, cwd="/")

    def _has_spoken(self) -> bool:
        """Whether its first word is there; this one's is waited for."""
        return True

    def _ask(self, line: bytes) -> dict[str, Any]:
        """Its answer to a line."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            _tell(process.stdin.fileno(), line)
            return json.loads(_line_of(process.stdout.fileno()))
        except (BrokenPipeError, ValueError) as error:
            self.close()
            raise LaunchError(
                f"the process that starts runners does not answer: {error}"
            ) from error


class TrainerHost(RunnerHost):
    """A host that has loaded the trainers, too; it is for jobs that run them unconfined.

    It loads them in the environment and the folder of the first such job, without its secrets; jobs
    of others are not its own. Only the first job waits for it, and not for longer than this takes
    where a machine has time: the first runs of a graph load nothing side by side.

    Args:
      module: the jobs' is `python -m MODULE …`; see `flowrl.launchers.trainer_host`.
    """

    def __init__(self, module: str) -> None:
        super().__init__()
        self._words = (sys.executable, "-m", module)
        self._place: tuple[Path, Mapping[str, str]] | None = None
        self._patience_seconds = LOAD_SECONDS

    def suits(self, job: Job) -> bool:
        """Whether it is for this job, as far as it can be known before it is ready."""
        if job.sandbox or job.argv[:MODULE_WORDS] != self._words:
            return False
        place = _place_of(job)
        self._place = self._place or place
        return self._place == place

    def _opened(self) -> subprocess.Popen[bytes]:
        assert self._place is not None
        cwd, env = self._place
        return _opened(["-m", TRAINER_HOST, self._words[-1]], env=env, cwd=cwd)

    def _has_spoken(self) -> bool:
        assert self._process is not None
        assert self._process.stdout is not None
        patience, self._patience_seconds = self._patience_seconds, 0.0
        return _is_open(self._process.stdout.fileno(), select.POLLIN, patience)

    def _ask(self, line: bytes) -> dict[str, Any]:
        try:
            return super()._ask(line)
        except LaunchError:
            if self._ready:
                raise
            return {"able": False}  # it has ended just now


def _place_of(job: Job) -> tuple[Path, Mapping[str, str]]:
    """The folder and what is not secret of the environment."""
    open_ones = {n: value for n, value in job.env.items() if not is_secret(n, job.passed)}
    return job.cwd, open_ones


def _opened(words: Sequence[str], *, env: Mapping[str, str], cwd: str | Path):
    """A host's process, whose command line has room for those of its forks."""
    return subprocess.Popen(
        [sys.executable, *words, " " * _ROOM_BYTES],
        env=env,
        cwd=cwd,
        start_new_session=True,
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )


def _tell(stream: int, line: bytes) -> None:
    """Say a line, however much of it the pipe takes at once."""
    os.set_blocking(stream, False)
    while line:
        if not _is_open(stream, select.POLLOUT, ANSWER_SECONDS):
            raise ValueError(f"it has not listened for {ANSWER_SECONDS:g} s")
        line = line[os.write(stream, line) :]


def _line_of(stream: int) -> bytes:
    text = b""
    while not text.endswith(b"\n"):
        if not _is_open(stream, select.POLLIN, ANSWER_SECONDS):
            raise ValueError(f"nothing within {ANSWER_SECONDS:g} s")
        chunk = os.read(stream, 4096)
        if not chunk:
            raise ValueError("it has ended")
        text += chunk
    return text


def _is_open(stream: int, way: int, seconds: float) -> bool:
    """Whether one can read (POLLIN) or write (POLLOUT) now or within these seconds."""
    poll = select.poll()
    poll.register(stream, way)
    return bool(poll.poll(seconds * 1000))
