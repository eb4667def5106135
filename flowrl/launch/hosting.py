"""The process that forks runners, from the side of the launcher that asks it to."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowrl.errors import LaunchError

HOST = Path(__file__).with_name("runner_host.py")
ANSWER_SECONDS = 10.0
_ROOM_BYTES = 2**14  # for three paths of the greatest length that Linux knows


class RunnerHost:
    """One such process, started when it is first needed, and anew when it has died."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
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
        process, self._process = self._process, None
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
        if self._process is not None and self._process.poll() is None:
            return True
        self.close()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(HOST), " " * _ROOM_BYTES],
            env={},
            cwd="/",
            start_new_session=True,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self.able = self._ask(b"")["able"]
        if not self.able:
            self.close()
        return self.able

    def _ask(self, line: bytes) -> dict[str, Any]:
        """Its answer to a line."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(line)
            answer = self._line_of(process.stdout.fileno())
            return json.loads(answer)
        except (BrokenPipeError, ValueError) as error:
            self.close()
            raise LaunchError(
                f"the process that starts runners does not answer: {error}"
            ) from error

    def _line_of(self, stream: int) -> bytes:
        poll = select.poll()
        poll.register(stream, select.POLLIN)
        text = b""
        while not text.endswith(b"\n"):
            if not poll.poll(ANSWER_SECONDS * 1000):
                raise ValueError(f"nothing within {ANSWER_SECONDS:g} s")
            chunk = os.read(stream, 4096)
            if not chunk:
                raise ValueError("it has ended")
            text += chunk
        return text
