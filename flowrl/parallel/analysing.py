"""Has contracts corrected after few successes (`--analyse_at`), one skill's after another.

The first run of a skill ends at that success, and is merged. A thread runs `flowrl analyse
--apply`; the skill is then trained on with the frames that are left. Runs go on meanwhile.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event

from flowrl.errors import format_error
from flowrl.launchers.child import flowrl_words, run_aside
from flowrl.parallel.events import Verb
from flowrl.parallel.notifying import tell_failure
from flowrl.parallel.scheduler import SkillScheduler
from flowrl.parallel.skill_sources import SkillConfig
from flowrl.parallel.status import Completed, Entry
from flowrl.paths import GraphPaths, printable

ANALYSING = "analysing"  # the notice
_SUCCESSES, _LEAST_EPISODES = 48, 256  # so many on average; a disproof takes 32
_LIMIT_SECONDS = 3600.0
logger = logging.getLogger(__name__)


class Analyser:
    """Analyses each skill whose first run ended at `success`, if that is above 0."""

    def __init__(self, success: float, graph_paths: GraphPaths) -> None:
        self._success, self._graph_paths = success, graph_paths
        self._pool, self._jobs = ThreadPoolExecutor(1), dict[str, Future[str]]()
        self._leaving = Event()

    def __enter__(self) -> Analyser:
        return self

    def __exit__(self, *_: object) -> None:
        """End what runs; the next start begins with it."""
        self._leaving.set()
        self._pool.shutdown(cancel_futures=True)

    def skill(self, entry: Entry) -> bool:
        """Return whether a skill's last run was one that ends early; analyse it if it came there.

        A run that spent its frames below that success, or a later one that changed nothing, is not
        followed by another one.
        """
        done = entry.status
        if not (isinstance(done, Completed) and 0 < self._success == done.goal):
            return False
        if done.success_rate >= done.goal and not done.why and entry.skill not in self._jobs:
            logger.info("%s: its contract is analysed", entry.skill)
            self._jobs[entry.skill] = self._pool.submit(self._problem, entry.skill)
        return True

    @property
    def under_way(self) -> frozenset[str]:
        """The skills that are to be trained on."""
        return frozenset(self._jobs)

    def train_on(self, scheduler: SkillScheduler, skills: Mapping[str, SkillConfig]) -> None:
        """Have skills that were analysed trained on."""
        for skill in [name for name, job in self._jobs.items() if job.done()]:
            if problem := self._jobs.pop(skill).result():
                what = f"{printable(skill)} is not analysed: {printable(problem)}"
                tell_failure(self._graph_paths, ANALYSING, what)
            done, ppo = scheduler.state.entries[skill].status, skills[skill].ppo
            if not isinstance(done, Completed):
                continue  # a user was faster
            most = scheduler.schedule.skill_timesteps_budget or ppo.total_timesteps
            left, goal = min(most, ppo.total_timesteps) - done.frames, ppo.success_state_rate
            if left > 0 and done.goal < goal:
                scheduler.ask(skill, Verb.TRAIN_MORE, goal=goal, number=left)

    def _problem(self, skill: str) -> str:
        """Correct a contract; returns why that failed, "" if it did not."""
        episodes = max(_LEAST_EPISODES, math.ceil(_SUCCESSES / self._success))
        words = ("analyse", str(self._graph_paths.root), f"--skill={skill}", "--apply")
        words = flowrl_words(*words, f"--episodes={episodes}")
        try:
            return run_aside(words, seconds=_LIMIT_SECONDS, leaving=self._leaving)
        except OSError as error:
            return format_error(error)
