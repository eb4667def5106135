"""A sweep's trials as trials of Ray Tune, on this machine.

The one file that imports Ray. Ray says when a trial runs; which one comes next, and what has ended,
says the sweep's folder. So a sweep that was killed goes on, with Ray or without.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from typing import Any

import ray  # pyright: ignore[reportMissingImports]
from ray import tune  # pyright: ignore[reportMissingImports]
from ray.tune.search import Searcher  # pyright: ignore[reportMissingImports]

from flowrl import storage
from flowrl.config import BottomUpConfig
from flowrl.errors import LaunchError
from flowrl.launchers.base import Exited, Finished, Lost
from flowrl.launchers.local import LocalLauncher
from flowrl.parallel.events import RunRequest, Verb
from flowrl.parallel.outcomes import described
from flowrl.parallel.requests import Inbox
from flowrl.paths import SweepPaths
from flowrl.runs import read_run
from flowrl.skills.graph import SkillGraph
from flowrl.tuning.sweep import TrialBackend, prepare_trial, remove_leftovers
from flowrl.tuning.trials import Sweep, next_trial, numbers, read_trials, write_outcome

_POLL_SECONDS = 0.5
_ENV = {"RAY_CHDIR_TO_TRIAL_DIR": "0", "RAY_USAGE_STATS_ENABLED": "0"}


class TrialSearch(Searcher):
    """Names the trials that Ray runs: begun ones that have not ended, then as `next_trial` says."""

    def __init__(
        self, sweep: Sweep, graph: SkillGraph, *, deadline: float, report: Callable[[], object]
    ) -> None:
        super().__init__(metric="score", mode="max")
        self._sweep, self._graph, self._deadline, self._report = sweep, graph, deadline, report
        self._begun = [each.trial.number for each in read_trials(sweep)[0] if not each.outcome]
        self._inbox = Inbox(sweep.sweep_paths)
        self._live: set[str] = set()  # Ray's names of trials

    def suggest(self, trial_id: str) -> Any:
        """Return the number of a trial; None while others have to end before."""
        stops = [each for each in self._inbox.take() if each.verb in (Verb.STOP, Verb.STOP_NOW)]
        if stops:
            self._inbox.done(stops)
            self._end()
        number = self._begun.pop(0) if self._begun else self._begin_next()
        if number is None:
            return None if self._live else Searcher.FINISHED
        self._live.add(trial_id)
        return {"number": number}

    def on_trial_complete(self, trial_id: str, result: dict | None = None, error: bool = False):
        """Report a trial that has ended; begin none after one whose task failed."""
        self._live.discard(trial_id)
        if error:
            self._end()
        self._report()

    def save(self, checkpoint_path: str) -> None:
        """Do nothing: a search holds no state."""

    restore = save

    def _end(self) -> None:
        self._begun, self._deadline = [], -math.inf

    def _begin_next(self) -> int | None:
        number = max(numbers(self._sweep.sweep_paths), default=-1) + 1
        late = time.monotonic() >= self._deadline
        trial = None if late else next_trial(self._sweep, read_trials(self._sweep)[0], number)
        if trial is None:
            return None
        prepare_trial(self._sweep, self._graph, trial)
        return number


def run_trials(
    sweep: Sweep,
    graph: SkillGraph,
    config: BottomUpConfig,
    *,
    backend: Callable[[Sweep], TrialBackend],
    deadline: float,
    report: Callable[[], object],
) -> None:
    """Run trials until none is left to begin, each on a CPU, or on its share of a GPU.

    Raises LaunchError if a trial could not be run; no other was begun after it.
    """
    sweep = replace(sweep, sweep_paths=SweepPaths(sweep.sweep_paths.root.absolute()))
    remove_leftovers(sweep.sweep_paths)
    env = {"env_vars": _ENV}
    ray.init(address="local", include_dashboard=False, log_to_driver=False, runtime_env=env)
    gpus = 1 / (config.launch.skills_per_gpu or 1) if ray.cluster_resources().get("GPU") else 0
    files = sweep.sweep_paths.root / "ray"  # Ray's own, and never read by us
    try:
        with redirect_stdout(sys.stderr):  # Ray's tables
            results = tune.Tuner(
                tune.with_resources(partial(_train, sweep, backend), {"cpu": 1, "gpu": gpus}),
                tune_config=tune.TuneConfig(
                    search_alg=TrialSearch(sweep, graph, deadline=deadline, report=report),
                    num_samples=-1,
                    max_concurrent_trials=config.schedule.max_parallel_skills,
                ),
                run_config=tune.RunConfig(storage_path=str(files), verbose=0),
            ).fit()
        for error in results.errors:
            why = str(error).strip().rpartition("\n")[2]
            raise LaunchError(f"a trial could not be run, so the sweep stops; start again: {why}")
    finally:
        ray.shutdown()
        storage.remove_tree(files)


def _train(sweep: Sweep, backend: Callable[[Sweep], TrialBackend], params: dict[str, int]) -> None:
    """Train one trial by the runner of all runs, adopt it if it lives, and record its outcome."""
    number, trials, launcher = params["number"], backend(sweep), LocalLauncher()
    run = read_run(sweep.run(number))
    request = RunRequest(
        skill=sweep.skill_of(number),
        expert=number,
        attempt=run.attempt,
        run_id=run.run_id,
        devices=tuple(str(gpu) for gpu in ray.get_gpu_ids()),
    )
    job = trials.reopen(request) or trials.prepare(request)
    handle = launcher.find(job)
    if handle is None or isinstance(launcher.poll(handle, job.folder), Exited | Lost):
        job = trials.prepare(request)
        handle = launcher.launch(job)
    while (ended := launcher.poll(handle, job.folder)) is None:
        time.sleep(_POLL_SECONDS)
    why = "" if isinstance(ended, Finished) else described(ended)
    tune.report({"score": write_outcome(sweep, number, why=why).score or 0.0})
