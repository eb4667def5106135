"""Films each skill once it is merged (`--video_after success`); nothing is decided by it.

A thread starts one `flowrl play` after another, which runs only while a processor is idle.
"""

from __future__ import annotations

import logging
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from threading import Event

from flowrl.config import VideoAfter
from flowrl.errors import FlowrlError, format_error
from flowrl.launchers.child import run_aside
from flowrl.parallel.notifying import tell_failure
from flowrl.parallel.status import Completed, Entry
from flowrl.paths import GraphPaths, RunPaths, printable
from flowrl.runs import read_run

FILMING = "filming"  # the notice
_EPISODES = 2
_POLL_SECONDS, _ARCHIVING_SECONDS = 0.5, 120.0
_LIMIT_SECONDS = 3600.0
logger = logging.getLogger(__name__)


class Filmer:
    """Makes a film of each skill that is completed, if that is asked for."""

    def __init__(self, when: VideoAfter, graph_paths: GraphPaths) -> None:
        """Take the folder; `when` says after which ends a film is made."""
        self._when, self._graph_paths = when, graph_paths
        self._pool, self._films = ThreadPoolExecutor(1), list[Future[None]]()
        self._leaving = Event()

    def __enter__(self) -> Filmer:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave out the films that are not made yet."""
        self._leaving.set()
        self._pool.shutdown(cancel_futures=True)

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
            run_id = entry.status.run_id
            self._films.append(self._pool.submit(self._film, entry.skill, archive, run_id))

    def _film(self, skill: str, archive: RunPaths, run_id: str) -> None:
        """Make one film; a failure is the notice."""
        until = time.monotonic() + _ARCHIVING_SECONDS  # a merged run is archived a little later
        while not _is_of(archive, run_id) and time.monotonic() < until:
            if self._leaving.wait(_POLL_SECONDS):
                return
        try:
            problem = self._problem(skill)
        except OSError as error:
            problem = format_error(error)
        if problem and not self._leaving.is_set():
            what = f"no film of {printable(skill)}: {printable(problem)}"
            tell_failure(self._graph_paths, FILMING, what)

    def _problem(self, skill: str) -> str:
        """Return why there is no film, "" if there is one."""
        words = [sys.executable, "-m", "flowrl.cli", "play", str(self._graph_paths.root)]
        words += [f"--skill={skill}", "--keep", f"--episodes={_EPISODES}"]
        return run_aside(words, seconds=_LIMIT_SECONDS, leaving=self._leaving, when_idle=True)


def _is_of(archive: RunPaths, run_id: str) -> bool:
    """Return whether the archive of a skill is that of this run, not of an earlier one."""
    try:
        return archive.run_json.exists() and read_run(archive).run_id == run_id
    except (FlowrlError, OSError):
        return False
