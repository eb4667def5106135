"""Has contracts corrected after few successes (`--analyse_at`), one skill's after another.

The first run of a skill ends at that success, and is merged. The skill is then to be trained on
with the frames that are left, and waits until a thread has run `flowrl analyse --apply`. Other runs
go on meanwhile.
"""

from __future__ import annotations

import logging
import math
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event

from flowrl.errors import BusyError, FileRefusedError, format_error
from flowrl.launchers.child import flowrl_words, run_aside
from flowrl.parallel.events import RunRequest
from flowrl.parallel.notifying import tell_failure
from flowrl.paths import GraphPaths, RunPaths, printable
from flowrl.runs import TrainingRun, read_result, read_run

ANALYSING = "analysing"  # the notice
EARLY = "--analyse_at"  # the origin of the goal of a run that ends early
_SUCCESSES, _LEAST_EPISODES = 48, 256  # so many on average; a disproof takes 32
_LIMIT_SECONDS = 3600.0
logger = logging.getLogger(__name__)


class Analyser:
    """Has skills analysed whose first run ended at `success`, if that is above 0."""

    def __init__(self, success: float, graph_paths: GraphPaths) -> None:
        self._success, self._graph_paths = success, graph_paths
        self._pool, self._jobs = ThreadPoolExecutor(1), dict[str, Future[str]]()
        self._analysed = set[str]()
        self._leaving = Event()

    def __enter__(self) -> Analyser:
        return self

    def __exit__(self, *_: object) -> None:
        """End what runs; the next start begins with it."""
        self._leaving.set()
        self._pool.shutdown(cancel_futures=True)

    @property
    def under_way(self) -> bool:
        """True if an analysis has not been taken by `take_ended` yet."""
        return bool(self._jobs)

    def hold(self, request: RunRequest) -> None:
        """Raise BusyError until the contract of a skill whose last run ended early is analysed."""
        skill = request.skill
        if not self._success or request.anew or skill in self._analysed:
            return
        if skill not in self._jobs:
            if not ended_early(self._graph_paths.archive(request.expert, skill)):
                return
            logger.info("%s: its contract is analysed", skill)
            self._jobs[skill] = self._pool.submit(self._problem, skill)
        raise BusyError("its contract is analysed first")

    def take_ended(self) -> list[str]:
        """Return the skills analysed since the last call; a failure is the notice."""
        ended = [skill for skill, job in self._jobs.items() if job.done()]
        for skill in ended:
            if problem := self._jobs.pop(skill).result():
                what = f"{printable(skill)} is not analysed: {printable(problem)}"
                tell_failure(self._graph_paths, ANALYSING, what)
        self._analysed.update(ended)
        return ended

    def _problem(self, skill: str) -> str:
        """Correct a contract; returns why that failed, "" if it did not."""
        episodes = max(_LEAST_EPISODES, math.ceil(_SUCCESSES / self._success))
        words = ("analyse", str(self._graph_paths.root), f"--skill={skill}", "--apply")
        words = flowrl_words(*words, f"--episodes={episodes}")
        try:
            return run_aside(words, seconds=_LIMIT_SECONDS, leaving=self._leaving)
        except OSError as error:
            return format_error(error)


def ended_early(run_paths: RunPaths, run_id: str | None = None) -> bool:
    """Return whether the run in a folder came to `--analyse_at` with frames left.

    False without such a run, or with a `run_id` if the folder holds another one.
    """
    try:
        run, result = read_run(run_paths), read_result(run_paths)
    except FileRefusedError:
        return False
    goal, budget = run.config["success_state_rate"], run.config["total_timesteps"]
    came = result.success_rate >= goal and result.frames < budget
    return was_to_end_early(run) and came and run_id in (None, run.run_id)


def fell_short(run_paths: RunPaths) -> bool:
    """Return whether a merged run was to end early, but spent its frames or was ended before."""
    try:
        run = read_run(run_paths)
    except FileRefusedError:
        return False
    return was_to_end_early(run) and not ended_early(run_paths)


def was_to_end_early(run: TrainingRun) -> bool:
    """Return whether the goal of a run is `--analyse_at`."""
    return run.origins.get("success_state_rate") == EARLY
