"""Runs a user's command when a skill or the graph has ended; nothing is decided by it.

Threads of a small pool wait for the commands, so none delays the scheduler's loop.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import shutil
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any

from flowrl import notices
from flowrl.errors import ConfigError, format_error
from flowrl.parallel.status import Entry
from flowrl.paths import GraphPaths, printable

FAILURE = "notify"  # the notice
_AT_ONCE, _MOST_WAITING = 4, 100
_SHELL = frozenset(("|", "||", "&", "&&", ";", ">", ">>", "<", "2>&1", "2>"))
_WHY = 500  # characters; the whole line fits into a pipe
logger = logging.getLogger(__name__)


class Notifier:
    """Gives a command, if there is one, a JSON line on its standard input for each end."""

    def __init__(
        self, command: str | None, graph_paths: GraphPaths, limit_seconds: float = 20.0
    ) -> None:
        """Take the command; ConfigError if it is malformed, or there is no such program."""
        try:
            self._words = shlex.split(command or "")
        except ValueError as error:
            raise ConfigError(f"--notify {command}: {error}; close the quotes") from error
        if command and not (self._words and shutil.which(self._words[0])):
            what = f"--notify {printable(command)} begins with no program that can be run"
            raise ConfigError(f"{what}; name one on PATH, or the path of one")
        if signs := sorted(_SHELL & set(self._words)):
            what = f"--notify {printable(command or '')} has {signs[0]}, but no shell runs it"
            raise ConfigError(f"{what}; say \"sh -c '…'\"")
        self._graph_paths, self._limit = graph_paths, limit_seconds
        self._pool, self._calls = ThreadPoolExecutor(_AT_ONCE), []

    def __enter__(self) -> Notifier:
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for the last calls, at most twice the limit; those that wait still are left out."""
        wait(self._calls, timeout=self._limit)
        self._pool.shutdown(cancel_futures=True)

    def skill(self, entry: Entry) -> None:
        """Say that a skill is completed or has failed."""
        names = ("attempt", "success_rate", "frames", "why")
        facts = {n: getattr(entry.status, n) for n in names if hasattr(entry.status, n)}
        self.tell(entry.status.kind, skill=entry.skill, expert=entry.expert, **facts)

    def tell(self, event: str, why: str = "", **facts: Any) -> None:
        """Run the command some time soon; one that would wait behind many others is left out."""
        self._calls = [call for call in self._calls if not call.done()]
        if self._words and len(self._calls) < _MOST_WAITING:
            line = {"event": event, "graph": str(self._graph_paths.root.absolute()), **facts}
            content = json.dumps({**line, "why": why[:_WHY]}).encode() + b"\n"
            self._calls.append(self._pool.submit(self._run, content))

    def _run(self, line: bytes) -> None:
        """Run the command with this line; a failure is the notice."""
        try:
            problem = self._problem(line)
        except OSError as error:
            problem = f"cannot be started: {format_error(error)}"
        if problem:
            what = f"--notify {printable(self._words[0])} {problem}"
            tell_failure(self._graph_paths, FAILURE, what)

    def _problem(self, line: bytes) -> str:
        """Return how the command failed, "" if it did not; OSError if it cannot be started."""
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        child = subprocess.Popen(
            self._words, stdin=pipe, stdout=null, stderr=null, start_new_session=True
        )
        try:
            child.communicate(line, timeout=self._limit)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            return f"was ended after {self._limit:g} seconds"
        return f"ended with exit code {child.returncode}" if child.returncode else ""


def tell_failure(graph_paths: GraphPaths, notice: str, text: str) -> None:
    """Log what has failed beside the scheduler, and let `flowrl status` say it."""
    logger.warning(text)
    with suppress(OSError):  # a full disk, or the graph is gone; the log has it
        notices.publish(graph_paths, notice, text)
