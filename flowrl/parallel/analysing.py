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
from flowrl.errors import FileRefusedError, format_error
from flowrl.launchers.child import flowrl_words, run_aside
from flowrl.paths import GraphPaths, RunPaths, printable
from flowrl.runs import read_result, read_run

ANALYSING = "analysing"  # the notice
_SUCCESSES, _LEAST_EPISODES = 48, 256  # so many on average; a disproof takes 32
_LIMIT_SECONDS = 3600.0
logger = logging.getLogger(__name__)


class Analyser:
    """Has skills analysed whose first run ended at `success`; with 0 none is."""

    def __init__(self, success: float, graph_paths: GraphPaths) -> None:
        self._success, self._graph_paths = success, graph_paths
        self._pool, self._jobs = ThreadPoolExecutor(1), dict[str, Future[str]]()
        self._problems: list[str] = []
        self._leaving = Event()

    def __enter__(self) -> Analyser:
        return self

    def __exit__(self, *_: object) -> None:
        """End what runs; the next start begins with it."""
        self._leaving.set()
        self._pool.shutdown(cancel_futures=True)

    @property
    def under_way(self) -> frozenset[str]:
        """The skills that are to be trained on."""
        return frozenset(self._jobs)

    def begin(self, skill: str) -> None:
        """Have a skill analysed, unless it is under way."""
        if skill not in self._jobs:
            self._jobs[skill] = self._pool.submit(self._problem, skill)
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

    def _problem(self, skill: str) -> str:
        """Correct a contract; returns why that failed, "" if it did not."""
        if not self._success:
            return ""
        logger.info("%s: its contract is analysed", skill)
        episodes = max(_LEAST_EPISODES, math.ceil(_SUCCESSES / self._success))
        words = ("analyse", str(self._graph_paths.root), f"--skill={skill}", "--apply")
        words = flowrl_words(*words, f"--episodes={episodes}")
        try:
            return run_aside(words, seconds=_LIMIT_SECONDS, leaving=self._leaving)
        except OSError as error:
            return format_error(error)

    def _tell(self) -> None:
        """Let `flowrl status` say what is analysed now, and what has failed."""
        skills = ", ".join(map(printable, self._jobs)) if self._success else ""
        now = [f"analysed now: {skills}"] if skills else []
        text = "; ".join([*self._problems, *now])
        with suppress(OSError):  # a full disk; the log has it
            if text:
                notices.publish(self._graph_paths, ANALYSING, text)
            else:
                notices.withdraw(self._graph_paths, ANALYSING)


def ended_early(run_paths: RunPaths, run_id: str | None = None) -> bool:
    """Return whether the run in a folder came to `--analyse_at` with frames left.

    False without such a run, or with a `run_id` if the folder holds another one.
    """
    try:
        run, result = read_run(run_paths), read_result(run_paths)
    except FileRefusedError:
        return False
    came = result.success_rate >= run.config["success_state_rate"]
    left = result.frames < run.config["total_timesteps"]
    return run.goal > 0 and came and left and run_id in (None, run.run_id)
