"""Running a sweep: trials are entries of a scheduler of the sweep's own folder.

The folder is a graph of its own: copies of the experts that the skill needs, pinned for all trials
alike, and a scheduler's state. So a sweep goes on beside the training of its graph.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from flowrl import storage
from flowrl.config import BottomUpConfig
from flowrl.errors import BusyError, FileRefusedError, FlowrlError, format_error, is_transient
from flowrl.experts import manifest as manifests
from flowrl.experts.manifest import Manifest
from flowrl.experts.store import ExpertStore
from flowrl.launchers.base import Job
from flowrl.measures.objectives import Curve, read_curve
from flowrl.parallel.events import RunRequest, Verb
from flowrl.parallel.scheduler import SkillScheduler
from flowrl.parallel.state import StateFile
from flowrl.parallel.status import FRESH, Active, Completed, Entry, Failed, Running, Waiting
from flowrl.parallel.training_backend import TrainingBackend
from flowrl.parallel.training_setup import (
    PreparedRun,
    clear_for_launch,
    prepare_training_run,
    read_own_run,
)
from flowrl.paths import GraphPaths, RunPaths, SweepPaths
from flowrl.runs import TrainingRun, read_result, read_run, write_run
from flowrl.skills.graph import SkillGraph
from flowrl.storage import records
from flowrl.tuning.pruning import RungScores, scores_at, should_prune
from flowrl.tuning.trials import (
    FAILED,
    JUDGED,
    OUTCOME,
    TRIAL,
    BegunTrial,
    CutRecord,
    Sweep,
    Trial,
    judged_at,
    next_trial,
    numbers,
    read_trials,
    searched,
    write_outcome,
)

logger = logging.getLogger(__name__)
_RUNGS = (9, 3)  # trials are compared after these parts of their frames


def create_sweep(sweep: Sweep, graph_paths: GraphPaths, *plans: SkillGraph) -> None:
    """Write a new sweep: copies of the experts that its skill begins with, and then what it is.

    A sweep that was half written is written again. The caller holds the sweep's folder. Raises
    BusyError if another start has begun it, ExpertCorruptError if an expert's files are others.
    """
    sweep_paths = sweep.sweep_paths
    if sweep_paths.sweep_json.exists():
        raise BusyError(f"{sweep_paths.root} was begun meanwhile; the same command goes on with it")
    storage.make_dir(sweep_paths.root)
    store, pinned = ExpertStore(graph_paths), ExpertStore(sweep_paths)
    skill, present = sweep.record.skill, store.manifest()
    first = {need for plan in plans for need in plan.all_needs(skill)}
    first |= {like for plan in plans if (like := plan.skills[skill].like)}
    experts = {n: each for n, each in present.experts.items() if each.skill in first}
    for version in experts.values():
        copy = pinned.path_of(version)
        storage.remove_tree(copy)
        store.copy(version, copy)
    if experts:
        manifests.swap(sweep_paths, Manifest(generation=present.generation, experts=experts))
    records.write(sweep_paths.sweep_json, sweep.record)


def expert_number(graph_paths: GraphPaths, skill: str) -> int:
    """The expert number that a skill has in its graph, or would get now."""
    experts = ExpertStore(graph_paths).manifest().experts
    known = {version.skill: index for index, version in experts.items()}
    state = StateFile(graph_paths.scheduler_state).load()
    if state is not None:
        known |= {e.skill: e.expert for e in state.entries.values() if e.expert is not None}
    free = max([-1, *known.values(), (state.next_expert if state else 0) - 1]) + 1
    return known.get(skill, free)


def remove_leftovers(sweep_paths: SweepPaths) -> None:
    """Remove what a kill or a power cut has left of files and folders."""
    folders = [sweep_paths.training_runs / str(number) for number in numbers(sweep_paths)]
    for folder in (sweep_paths.root, sweep_paths.checkpoints, sweep_paths.training_runs, *folders):
        storage.remove_leftovers(folder)


def prepare_trial(sweep: Sweep, graph: SkillGraph, trial: Trial) -> None:
    """Make a trial's run folder, with trial.json in it; all of it appears at once."""
    record, experts = sweep.record, ExpertStore(sweep.sweep_paths).manifest().experts
    prepare_training_run(
        graph_paths=sweep.sweep_paths,
        graph=graph,
        skill=record.skill,
        expert=record.expert,
        attempt=1,
        completed={version.skill: index for index, version in experts.items()},
        config=sweep.config_of(trial),
        origins={**record.origins, **dict.fromkeys(trial.point, f"trial {trial.number}")},
        run_paths=sweep.run(trial.number),
        records={TRIAL: records.encode(trial)},
    )


class TrialBackend(TrainingBackend):
    """Runs trials in their own folders, and merges nothing."""

    def __init__(
        self, sweep: Sweep, *, graph: SkillGraph, config: BottomUpConfig, **given: Any
    ) -> None:
        super().__init__(sweep.sweep_paths, config, graph, **given)
        self._sweep = sweep

    def prepare(self, request: RunRequest) -> Job:
        """Make the folder of a trial ready; a further attempt begins anew, with another seed.

        The attempt alone tells one from the other. A request that names the folder's run comes to
        `resume` instead; any other is for a new attempt, which has a number of its own, unless this
        was called for it before a kill: then run.json has its number, and its run is kept.
        """
        prepared = self._found(request)
        run_paths, run = prepared.run_paths, prepared.run
        clear_for_launch(run_paths)
        if run.attempt != request.attempt:
            for folder in (run_paths.resume, run_paths.finals):
                storage.remove_tree(folder)
            if run_paths.metrics.exists():
                storage.copy_file(run_paths.metrics, run_paths.folder / FAILED.format(run.attempt))
                storage.remove_file(run_paths.metrics)
            for name in (OUTCOME, JUDGED):  # of a trial that is asked to try again
                storage.remove_file(run_paths.folder / name)
            run_id = f"e{run.expert}.a{request.attempt}.{secrets.token_hex(4)}"
            run = replace(run, attempt=request.attempt, run_id=run_id)
            write_run(run_paths, run)
        return self.job_of(PreparedRun(run_paths=run_paths, run=run), request)

    def merge(self, request: RunRequest) -> Mapping[str, Any]:
        """Take the result as it is: the experts of a trial stay in its folder."""
        return {"run_id": read_result(self._sweep.run(request.expert)).run_id}

    def archive(self, request: RunRequest) -> None:
        """Remove the copies that the run started from."""
        storage.remove_tree(self._sweep.run(request.expert).policies / "seed")

    def discard(self, request: RunRequest) -> None:
        """Leave the folder of a failed attempt to the next one, and to people."""

    def _live(self) -> Iterable[RunPaths]:
        return map(self._sweep.run, numbers(self._sweep.sweep_paths))

    def _found(self, request: RunRequest) -> PreparedRun:
        run_paths = self._sweep.run(request.expert)
        return PreparedRun(
            run_paths=run_paths, run=read_own_run(run_paths, self._sweep.record.skill)
        )

    def job_of(self, prepared: PreparedRun, request: RunRequest) -> Job:
        """Return the job of a trial, whose group in W&B is its sweep's."""
        job = super().job_of(prepared, request)
        return replace(job, env={**job.env, "WANDB_RUN_GROUP": self._sweep.sweep_paths.root.name})

    def _say_other_settings(self, run: TrainingRun) -> None:
        """Say nothing: each trial has settings of its own."""


class Sweeper:
    """Begins trials as others end, and records what they came to.

    `look` is called at each tick and each end. Nothing is begun after the `deadline`, by
    `time.monotonic`. `report` is called when a trial has ended. `graphs` has the graph of each
    candidate by its label, or that of all trials as "".
    """

    def __init__(
        self,
        sweep: Sweep,
        graphs: Mapping[str, SkillGraph],
        scheduler: SkillScheduler,
        *,
        deadline: float,
        report: Callable[[], object],
    ) -> None:
        self.sweep = sweep
        self._graphs = graphs
        self._scheduler = scheduler
        self._deadline = deadline
        self._report = report
        self._curves: dict[int, Curve] = {}  # of trials that have ended

    def begin(self) -> None:
        """Take up what an earlier start of the sweep has left."""
        remove_leftovers(self.sweep.sweep_paths)
        known = {entry.expert for entry in self._scheduler.state.entries.values()}
        tried, left_out = read_trials(self.sweep)
        for why in left_out:
            logger.warning(why)
        for each in tried:
            if each.outcome is None and each.trial.number not in known:
                self._add(each.trial.number)
        self.tick()

    def tick(self, _skill: str = "") -> None:
        """Record the trials that have ended, begin others, and end those that are far behind.

        What the disk does not take now is done at a later tick.
        """
        try:
            self._record_ends()
            while self._has_room() and self._begin_next():
                pass
            self._prune()
        except (FlowrlError, OSError) as error:
            if not is_transient(error):
                raise
            logger.warning("the sweep waits: %s", format_error(error))

    def _prune(self) -> None:
        """Let trials that are far behind end with what they have."""
        running = {
            each.expert
            for each in self._scheduler.state.entries.values()
            if isinstance(each.status, Running) and not each.status.stop_reason
        }
        if self.sweep.search.pruner == "none" or not running:
            return
        rungs = [self.sweep.horizon / part for part in _RUNGS]
        curves: dict[int, Curve] = {}
        scores: dict[int, RungScores] = {}
        for each in searched(read_trials(self.sweep)[0]):
            number, ended = each.trial.number, each.outcome
            by_itself = ended is not None and ended.stopped != "pruned" and not ended.why
            curves[number] = self._curve(each)
            scores[number] = scores_at(rungs, curves[number], self._score, ended=by_itself)
        for number in scores.keys() & running:
            if should_prune(number, scores):
                judged = CutRecord(frames=curves[number][-1].frames)
                records.write(self.sweep.run(number).folder / JUDGED, judged)
                self._scheduler.ask(self.sweep.skill_of(number), Verb.PRUNE)

    def _score(self, curve: Curve) -> float:
        return self.sweep.score(curve, curve[-1].success)

    def _curve(self, each: BegunTrial) -> Curve:
        """The curve of a trial, up to where it was cut."""
        number, ended = each.trial.number, each.outcome
        if ended is None:
            self._curves.pop(number, None)
        elif number in self._curves:
            return self._curves[number]
        try:
            curve: Curve = read_curve(self.sweep.run(number).metrics)
        except FileRefusedError as error:  # its trainer has written something else
            if is_transient(error):
                raise
            curve = ()
        if (cut_at := judged_at(self.sweep, number)) and (not ended or ended.cut_at):
            curve = [point for point in curve if point.frames <= cut_at]
        if ended:
            self._curves[number] = curve
        return curve

    def _record_ends(self) -> None:
        for entry in self._scheduler.state.entries.values():
            number = entry.expert
            if number is not None and isinstance(entry.status, Completed | Failed):
                run_paths = self.sweep.run(number)
                known = (run_paths.folder / TRIAL).exists()
                if known and not (run_paths.folder / OUTCOME).exists():
                    why = entry.status.why if isinstance(entry.status, Failed) else ""
                    write_outcome(self.sweep, number, why=why)
                    self._report()

    def _has_room(self) -> bool:
        state = self._scheduler.state
        live = sum(isinstance(each.status, Active | Waiting) for each in state.entries.values())
        room = live < self._scheduler.schedule.max_parallel_skills
        return room and not state.stop_mode and time.monotonic() < self._deadline

    def _begin_next(self) -> bool:
        tried, _ = read_trials(self.sweep)
        taken = [entry.expert or 0 for entry in self._scheduler.state.entries.values()]
        number = max([-1, *taken, *numbers(self.sweep.sweep_paths)]) + 1
        trial = next_trial(self.sweep, tried, number)
        if trial is None:
            return False
        prepare_trial(self.sweep, self._graphs[trial.candidate], trial)
        storage.fault_point("sweep.proposed")
        self._add(trial.number)
        return True

    def _add(self, number: int) -> None:
        """Hand a trial to the scheduler; one that was launched before is adopted."""
        run_paths, status = self.sweep.run(number), FRESH
        if run_paths.start_json.exists():
            run = read_run(run_paths)
            since = datetime.fromtimestamp(run_paths.run_json.stat().st_mtime, UTC)
            status = Running(run_id=run.run_id, attempt=run.attempt, handle=None, since=since)
        new = Entry(skill=self.sweep.skill_of(number), expert=number, status=status)
        self._scheduler.add_skills([new])
