"""Has contracts corrected after few successes (`--analyse_at`), one skill's after another.

The first run of a skill ends at that success, and is merged. A thread runs `flowrl analyse
--apply`; the skill is then trained on with the frames that are left. Runs go on meanwhile.
"""

from __future__ import annotations

import logging
import math
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from threading import Event

from flowrl import notices
from flowrl.errors import format_error
from flowrl.launchers.child import flowrl_words, run_aside
from flowrl.paths import GraphPaths, printable

ANALYSING = "analysing"  # the notice
_SUCCESSES, _LEAST_EPISODES = 48, 256  # so many on average; a disproof takes 32
_LIMIT_SECONDS = 3600.0
logger = logging.getLogger(__name__)


class Analyser:
    """Has skills analysed, if that is asked for."""

    def __init__(self, graph_paths: GraphPaths, *, asked_for: bool) -> None:
        self._graph_paths, self._asked_for = graph_paths, asked_for
        self._pool, self._jobs = ThreadPoolExecutor(1), dict[str, Future[str]]()
        self._problems: list[str] = []
        self._leaving = Event()

    def __enter__(self) -> Analyser:
        return self

    def __exit__(self, *_: object) -> None:
        """End what runs; the next start begins with it."""
        self._leaving.set()
        self._pool.shutdown(cancel_futures=True)
        if self._jobs:  # else nothing was told, and the folder may be another scheduler's
            self._jobs.clear()
            self._tell()

    @property
    def under_way(self) -> frozenset[str]:
        """The skills that are to be trained on."""
        return frozenset(self._jobs)

    def begin(self, skill: str, success_rate: float) -> None:
        """Have a skill analysed that succeeds so often, unless it is under way."""
        if skill not in self._jobs:
            self._jobs[skill] = self._pool.submit(self._problem, skill, success_rate)
            self._tell()

    def take_ended(self) -> list[str]:
        """Return the skills that are to be trained on now; what has failed is in the notice."""
        ended = [skill for skill, job in self._jobs.items() if job.done()]
        for skill in ended:
            if problem := self._jobs.pop(skill).result():
                logger.warning("%s is not analysed: %s", skill, problem)
                self._problems.append(f"{printable(skill)} is not analysed: {printable(problem)}")
        if ended:
            self._tell()
        return ended

    def _problem(self, skill: str, success_rate: float) -> str:
        """Correct a contract; returns why that failed, "" if it did not."""
        if not self._asked_for:
            return ""
        logger.info("%s: its contract is analysed", skill)
        episodes = max(_LEAST_EPISODES, math.ceil(_SUCCESSES / success_rate))
        words = ("analyse", str(self._graph_paths.root), f"--skill={skill}", "--apply")
        words = flowrl_words(*words, f"--episodes={episodes}")
        try:
            return run_aside(words, seconds=_LIMIT_SECONDS, leaving=self._leaving)
        except OSError as error:
            return format_error(error)

    def _tell(self) -> None:
        """Let `flowrl status` say what is analysed now, and what has failed."""
        skills = ", ".join(map(printable, self._jobs)) if self._asked_for else ""
        now = [f"analysed now: {skills}"] if skills else []
        text = "; ".join([*self._problems, *now])
        with suppress(OSError):  # a full disk; the log has it
            if text:
                notices.publish(self._graph_paths, ANALYSING, text)
            else:
                notices.withdraw(self._graph_paths, ANALYSING)
