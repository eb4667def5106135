"""Asking a tmux server, which may be missing, just ending, or frozen."""

from __future__ import annotations

import logging
import shutil
import subprocess
import time
from dataclasses import dataclass

import libtmux
from libtmux.common import has_minimum_version
from libtmux.exc import LibTmuxException

from flowrl.errors import ConfigError, LaunchError

RUN_OPTION = "@flowrl_run"
FOLDER_OPTION = "@flowrl_folder"
ANSWER_SECONDS = 10.0

_FIELDS = ("session_name", "pane_id", "pane_pid", "pid", RUN_OPTION, FOLDER_OPTION)
PANE_FORMAT = "\t".join(f"#{{{field}}}" for field in _FIELDS)
_MISSING = "tmux is not installed; install it (apt install tmux) or use --launcher local"
_ENDING = "server exited unexpectedly"
_NO_SERVER = ("no server running", "No such file or directory", "no current target")
_PAUSE_SECONDS = 0.05

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Pane:
    """A pane as `PANE_FORMAT` prints it; those that are not flowrl's have no run and no folder."""

    session: str
    pane: str
    pid: int
    server_pid: int
    run_id: str
    folder: str

    @classmethod
    def parse(cls, line: str) -> Pane:
        """Read one line."""
        session, pane, pid, server_pid, run_id, folder = line.split("\t")
        return cls(session, pane, int(pid), int(server_pid), run_id, folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What tmux printed, in lines, and its exit code."""

    returncode: int
    stdout: list[str]
    stderr: list[str]

    @property
    def why(self) -> str:
        """Why it refused, for people."""
        return "; ".join(self.stderr) or f"exit code {self.returncode}"


class TmuxServer:
    """One server, by the name of its socket (as `tmux -L`), by its path, or the user's own."""

    def __init__(self, socket: str | None = None) -> None:
        by_path = socket is not None and "/" in socket
        server = libtmux.Server(
            socket_name=None if by_path else socket, socket_path=socket if by_path else None
        )
        self.socket_name, self.socket_path = server.socket_name, server.socket_path

    def check(self) -> None:
        """See that tmux is there and new enough; no server is started or asked.

        Raises:
          ConfigError: it is not.
        """
        if shutil.which("tmux") is None:
            raise ConfigError(_MISSING)
        try:
            has_minimum_version()
        except LibTmuxException as error:
            raise ConfigError(f"tmux cannot be used, use --launcher local: {error}") from error

    def ask(self, *words: str) -> Reply:
        """Have tmux carry out one command line; what it refuses is in the reply.

        Raises:
          LaunchError: tmux is missing, cannot be executed, or does not answer.
        """
        reply = self._run(words)
        if any(_ENDING in line for line in reply.stderr):
            time.sleep(_PAUSE_SECONDS)
            reply = self._run(words)
        if reply.returncode != 0:
            logger.debug("tmux refused", extra={"tmux": words, "stderr": reply.stderr})
        return reply

    def panes(self) -> list[Pane]:
        """Every pane of the server; none when there is no server.

        Raises:
          LaunchError: tmux cannot say.
        """
        reply = self.ask("list-panes", "-a", "-F", PANE_FORMAT)
        if reply.returncode == 0:
            return [Pane.parse(line) for line in reply.stdout]
        if any(words in reply.why for words in _NO_SERVER):
            return []
        raise LaunchError(f"tmux cannot list its panes: {reply.why}")

    def _run(self, words: tuple[str, ...]) -> Reply:
        """Run one tmux client; libtmux's `Server.cmd` would wait for a frozen server for ever."""
        tmux = shutil.which("tmux")
        if tmux is None:
            raise LaunchError(_MISSING)
        try:
            done = subprocess.run(
                [tmux, *self._address(), *words],
                check=False,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                encoding="utf-8",
                errors="backslashreplace",
                timeout=ANSWER_SECONDS,
            )
        except subprocess.TimeoutExpired as error:
            raise LaunchError(
                f"the tmux server does not answer within {ANSWER_SECONDS:g} s; "
                "if it is stopped, continue it (kill -CONT) or end it"
            ) from error
        except OSError as error:
            raise LaunchError(f"tmux cannot be executed: {error}") from error
        return Reply(
            returncode=done.returncode, stdout=_lines(done.stdout), stderr=_lines(done.stderr)
        )

    def _address(self) -> list[str]:
        if self.socket_path is not None:
            return ["-S", str(self.socket_path)]
        return [] if self.socket_name is None else ["-L", self.socket_name]


def _lines(text: str) -> list[str]:
    return text.rstrip("\n").split("\n") if text.strip("\n") else []
