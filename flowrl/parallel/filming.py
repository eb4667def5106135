"""Films each skill once it is merged (`--video_after success`); nothing is decided by it.

A thread starts one `flowrl play` after another, at the lowest priority, so none delays a run.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress

from flowrl import notices
from flowrl.config import VideoAfter
from flowrl.errors import format_error
from flowrl.parallel.status import Completed, Entry
from flowrl.paths import GraphPaths, RunPaths, printable

FILMING = "filming"  # the notice
_EPISODES = 2
_POLL_SECONDS, _ARCHIVING_SECONDS = 0.5, 120.0
_LIMIT_SECONDS = 3600.0
_LOWEST = 19
logger = logging.getLogger(__name__)


class Filmer:
    """Makes a film of each skill that is completed, if that is asked for."""

    def __init__(self, when: VideoAfter, graph_paths: GraphPaths) -> None:
        """Take the folder; `when` says after which ends a film is made."""
        self._when, self._graph_paths = when, graph_paths
        self._pool, self._films = ThreadPoolExecutor(1), list[Future[None]]()
        self._child: subprocess.Popen[bytes] | None = None
        self._leaving = False

    def __enter__(self) -> Filmer:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave out the films that are not made yet."""
        self._leaving = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        child = self._child
        if child is not None and child.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)

    def finish(self) -> None:
        """Wait for all films that are asked for."""
        left = [film for film in self._films if not film.done()]
        if left:
            logger.info("making the last %d films; Ctrl-C leaves them out", len(left))
        wait(left)

    def skill(self, entry: Entry) -> None:
        """Film a skill if it is completed."""
        if self._when == "success" and isinstance(entry.status, Completed):
            archive = self._graph_paths.archive(entry.expert or 0, entry.skill)
            self._films.append(self._pool.submit(self._film, entry.skill, archive))

    def _film(self, skill: str, archive: RunPaths) -> None:
        """Make one film; a failure is the notice."""
        until = time.monotonic() + _ARCHIVING_SECONDS  # a merged run is archived a little later
        while not archive.run_json.exists() and time.monotonic() < until and not self._leaving:
            time.sleep(_POLL_SECONDS)
        try:
            problem = "" if self._leaving else self._problem(skill)
        except (OSError, subprocess.TimeoutExpired) as error:
            problem = format_error(error)
        if problem and not self._leaving:
            text = f"no film of {printable(skill)}: {printable(problem)}"
            logger.warning(text)
            with suppress(OSError):  # a full disk; the log has it
                notices.publish(self._graph_paths, FILMING, text)

    def _problem(self, skill: str) -> str:
        """Return why there is no film, "" if there is one."""
        words = [sys.executable, "-m", "flowrl.cli", "play", str(self._graph_paths.root)]
        words += [f"--skill={skill}", "--keep", f"--episodes={_EPISODES}"]
        out, null = subprocess.PIPE, subprocess.DEVNULL
        child = self._child = subprocess.Popen(
            words, stdin=null, stdout=null, stderr=out, start_new_session=True
        )
        os.setpriority(os.PRIO_PROCESS, child.pid, _LOWEST)
        try:
            _, said = child.communicate(timeout=_LIMIT_SECONDS)
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
        last = said.decode(errors="replace").strip().rpartition("\n")[2]
        return f"exit code {child.returncode}: {last}" if child.returncode else ""
