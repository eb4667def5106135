"""The folder of a sweep: what it is, its trials, and what each of them came to.

A trial's folder is a run folder that appears at once and whole, with trial.json in it; outcome.json
is added when its run has ended. A search has no other state: `next_trial` is a function of these
records.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import statistics
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from flowrl import config as configs
from flowrl import storage
from flowrl.config import PPOConfig
from flowrl.errors import ConfigError, FileRefusedError, is_transient
from flowrl.measures.objectives import Curve, CurvePoint, parse_objective, read_curve, run_figures
from flowrl.paths import RunPaths, SweepPaths
from flowrl.runs import SkillName, read_result
from flowrl.storage import records
from flowrl.storage.records import Natural, Share, Word
from flowrl.tuning.search import SearchConfig, grid_points, read_budget, suggest
from flowrl.tuning.space import Observation, SearchInput, Space, admissible, space_from_data

TRIAL, OUTCOME, JUDGED = "trial.json", "outcome.json", "judged.json"
LIMITS = ("trials", "budget")  # flags that prolong a sweep
FAILED = "metrics.{}.jsonl"  # metrics.jsonl of a failed attempt, by its number
_FINALISTS = 3  # points that are trained again beside the default
_REMEDY = "it is left out; remove its folder, or restore it from a copy"
_TRIALS, _MOST_TRIALS = 20, 10_000
_AGAIN = 2  # most trials of a point and a seed that must not be missing


@dataclass(frozen=True, slots=True, kw_only=True)
class CompetingText:
    """A text of the skill that competes with others, and the settings that it is trained with."""

    label: str
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRecord:
    """sweep.json: what a sweep is; written once.

    `flags` are those of the command that began it, `config` is how the skill is trained by default,
    `starts` are the points that are tried first. With `candidates` nothing but these is tried, all
    with one seed.
    """

    sweep: Word
    skill: SkillName
    expert: Natural
    flags: Mapping[str, Any]
    space: Mapping[str, Any]
    config: Mapping[str, Any]
    origins: Mapping[str, str]
    starts: tuple[Mapping[str, Any], ...]
    candidates: tuple[CompetingText, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """trial.json: what a trial is, and the numbers of the trials that its point follows from.

    One that confirms has the point of the trial `repeats`, or that of the default.
    """

    sweep: Word
    number: Natural
    point: Mapping[str, Any]
    seed: Natural
    confirms: bool = False
    repeats: Natural | None = None
    ended: tuple[Natural, ...] = ()
    pending: tuple[Natural, ...] = ()
    candidate: str = ""  # its label

    @property
    def described(self) -> str:
        """The candidate or the point, for people."""
        values = ", ".join(f"{name} {value}" for name, value in self.point.items())
        return self.candidate or values or "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialOutcome:
    """outcome.json: what a trial's run came to; one that failed has no score, and `why`.

    The score of a trial that a pruner ended is that of `cut_at` frames, where it was judged.
    """

    score: Share | None
    frames: Natural
    seconds: float
    stopped: str = ""
    why: str = ""
    cut_at: Natural = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CutRecord:
    """judged.json: the frames of a trial when a pruner asked it to end."""

    frames: Natural


@dataclass(frozen=True, slots=True)
class BegunTrial:
    """A trial, and its outcome once it has ended."""

    trial: Trial
    outcome: TrialOutcome | None

    @property
    def score(self) -> float | None:
        """The score of a trial that ended well."""
        return self.outcome.score if self.outcome else None

    @property
    def cut_at(self) -> int:
        """The frames at which a pruner cut the trial; 0 if none did."""
        return self.outcome.cut_at if self.outcome else 0


@dataclass(frozen=True)
class Sweep:
    """A sweep's folder and what it is."""

    sweep_paths: SweepPaths
    record: SweepRecord

    @functools.cached_property
    def base(self) -> PPOConfig:
        """The default settings of the skill."""
        return configs.from_json(PPOConfig, self.record.config)

    @functools.cached_property
    def space(self) -> Space:
        """The dimensions that are searched."""
        space = Space(())
        if not self.record.candidates:
            space = space_from_data(self.record.space, str(self.sweep_paths.sweep_json))
        return dataclasses.replace(space, base=self.base)

    @functools.cached_property
    def search(self) -> SearchConfig:
        """The choice and the scoring of points."""
        return configs.from_json(SearchConfig, self.record.flags)

    @property
    def most_trials(self) -> int:
        """The most trials of the search."""
        return self.search.trials or (_MOST_TRIALS if self.search.budget else _TRIALS)

    @property
    def beside_budget(self) -> str:
        """Say what confirming may cost beside the budget; nothing without a budget."""
        if not (self.search.budget and self.search.confirm):
            return ""
        most = f"{(_FINALISTS + 1) * self.search.confirm} trials of {self.horizon:,} frames"
        said = f"confirming takes up to {most} beside it, none with --confirm 0"
        return f"--budget bounds the search; {said}"

    @property
    def horizon(self) -> int:
        """The frames over which trials are compared: the most that one may take."""
        for each in self.space.dimensions:
            if each.name == "total_timesteps":
                return int(max(each.choices) if each.kind == "choice" else each.value(1.0))
        return self.base.total_timesteps

    def score(self, curve: Curve, success: float) -> float:
        """Return the score of a run by the sweep's objective, in [0, 1]."""
        goal = self.base.success_state_rate
        figures = run_figures(curve, success, budget_frames=self.horizon, goal=goal)
        return parse_objective(self.search.objective).score(figures)

    def run(self, number: int) -> RunPaths:
        """The run folder of a trial."""
        return self.sweep_paths.trial(number, self.record.expert)

    def skill_of(self, number: int) -> str:
        """The name of a trial in its scheduler, and with its number that of its session."""
        return f"{self.record.skill} t{number}"

    def config_of(self, trial: Trial) -> PPOConfig:
        """Return a trial's settings; every update is logged, so that equal trials score alike."""
        config = admissible(trial.point, self.base)
        for each in self.record.candidates:
            if each.label == trial.candidate:
                config = configs.from_json(PPOConfig, each.config)
        return dataclasses.replace(config, seed=trial.seed, log_seconds=0.0)

    def cost(self, outcome: TrialOutcome) -> float:
        """Return the cost of a trial, in the unit of the budget."""
        unit = read_budget(self.search.budget)[1]
        return outcome.seconds if unit == "seconds" else float(outcome.frames)

    def observation(self, each: BegunTrial) -> Observation:
        """A trial that has ended, as the search sees it."""
        assert each.outcome
        return Observation(
            number=each.trial.number,
            point=each.trial.point,
            score=each.score,
            cost=self.cost(each.outcome),
            cut_at=each.cut_at,
        )

    def budget_left(self, begun: Sequence[BegunTrial]) -> float:
        """The share of the budget that these trials of the search leave.

        A running one counts with all its frames, or with the mean seconds of those that have ended.
        """
        left, (budget, _) = 1.0 - len(begun) / self.most_trials, read_budget(self.search.budget)
        if budget is not None:
            spent = [self.cost(each.outcome) for each in begun if each.outcome]
            to_come = sum(self._expected(each, spent) for each in begun if not each.outcome)
            left = min(left, 1.0 - (sum(spent) + to_come) / budget)
        return max(0.0, left)

    def _expected(self, each: BegunTrial, spent: Sequence[float]) -> float:
        """The cost of a running trial, in the unit of the budget; 0 if nothing is known of it."""
        if read_budget(self.search.budget)[1] == "seconds":
            return statistics.fmean(spent) if spent else 0.0
        return float(self.config_of(each.trial).total_timesteps)


def prolong(sweep: Sweep, asked: SearchConfig, given: Container[str]) -> Sweep:
    """Write down the limits that are given, which may be larger than before.

    Points are confirmed anew then. The caller holds the sweep's folder. Raises ConfigError if a
    limit is smaller, or a budget has another unit.
    """
    names = [name for name in LIMITS if name in given]
    flags = {**sweep.record.flags, **{name: getattr(asked, name) for name in names}}
    now = Sweep(sweep.sweep_paths, dataclasses.replace(sweep.record, flags=flags))
    (budget, unit), (had, had_unit) = (read_budget(each.search.budget) for each in (now, sweep))
    less = {"trials": now.most_trials < sweep.most_trials}
    less["budget"] = had is not None and (budget is None or budget < had or unit != had_unit)
    for name in names:
        if less[name]:
            raise ConfigError(
                f"--{name} is less than {sweep.sweep_paths.root} has, or of another kind; give "
                "more to prolong it, or leave it out"
            )
    if flags != sweep.record.flags:
        storage.remove_file(sweep.sweep_paths.outcome_json)
        records.write(sweep.sweep_paths.sweep_json, now.record)
    return now


def open_sweep(sweep_paths: SweepPaths) -> Sweep:
    """Read what a sweep is; raises FileRefusedError if sweep.json is missing or damaged."""
    return Sweep(sweep_paths, records.read(sweep_paths.sweep_json, SweepRecord))


def read_trials(sweep: Sweep) -> tuple[list[BegunTrial], list[str]]:
    """Return the trials by number, and why others are left out: torn, foreign or edited ones.

    Raises FileRefusedError if one cannot be read now, but may be later.
    """
    tried: list[BegunTrial] = []
    left_out: list[str] = []
    for number in numbers(sweep.sweep_paths):
        try:
            tried.append(_read(sweep, number))
        except (FileRefusedError, ConfigError) as error:
            if is_transient(error):
                raise
            left_out.append(f"trial {number}: {error}")
    return tried, left_out


def numbers(sweep_paths: SweepPaths) -> list[int]:
    """The numbers of all folders of trials, also of torn ones."""
    folder = sweep_paths.training_runs
    names = (path.name for path in folder.iterdir()) if folder.is_dir() else ()
    return sorted(int(name) for name in names if name.isascii() and name.isdecimal())


def _read(sweep: Sweep, number: int) -> BegunTrial:
    folder = sweep.run(number).folder
    trial = records.read(folder / TRIAL, Trial, remedy=_REMEDY)
    if (trial.sweep, trial.number) != (sweep.record.sweep, number):
        raise FileRefusedError(f"{folder / TRIAL} is trial {trial.number} of sweep {trial.sweep}")
    if trial.point or not trial.confirms:
        sweep.space.to_unit(trial.point)
    ended = (folder / OUTCOME).exists()
    return BegunTrial(trial, records.read(folder / OUTCOME, TrialOutcome) if ended else None)


def write_outcome(sweep: Sweep, number: int, *, why: str = "") -> TrialOutcome:
    """Record what a trial came to; `why` it failed, if it did.

    The figures of attempts that failed before count with its cost. Raises FileRefusedError if a
    file of the trainer's cannot be read now, but may be later.
    """
    run_paths, result = sweep.run(number), None
    curves: list[Curve] = [()]
    try:
        failed = sorted(run_paths.folder.glob(FAILED.format("*")))
        curves = [read_curve(each) for each in (*failed, run_paths.metrics)]
        result = None if why else read_result(run_paths)
    except FileRefusedError as error:
        if is_transient(error):
            raise
        why = str(error)
    if result is not None and not curves[-1]:
        length = result.mean_episode_length
        end = CurvePoint(result.frames, result.wall_seconds, result.success_rate, length)
        curves[-1] = (end,)
    ends = [curve[-1] for curve in curves if curve]
    whole, success = curves[-1], result.success_rate if result else 0.0
    cut_at = judged_at(sweep, number) if result and result.stopped == "pruned" else 0
    if cut := [point for point in whole if point.frames <= cut_at]:
        whole, success = cut, cut[-1].success
    outcome = TrialOutcome(
        score=None if why or result is None else sweep.score(whole, success),
        frames=sum(end.frames for end in ends),
        seconds=sum(end.seconds for end in ends),
        stopped=result.stopped if result else "",
        why=why,
        cut_at=cut_at if cut else 0,
    )
    records.write(run_paths.folder / OUTCOME, outcome)
    return outcome


def judged_at(sweep: Sweep, number: int) -> int:
    """Return the frames at which a pruner asked a trial to end; 0 if none did."""
    path = sweep.run(number).folder / JUDGED
    return records.read(path, CutRecord).frames if path.exists() else 0


def searched(tried: Sequence[BegunTrial]) -> list[BegunTrial]:
    """The trials of the search."""
    return [each for each in tried if not each.trial.confirms]


def confirming(tried: Sequence[BegunTrial]) -> list[BegunTrial]:
    """The trials that confirm."""
    return [each for each in tried if each.trial.confirms]


def next_trial(sweep: Sweep, tried: Sequence[BegunTrial], number: int) -> Trial | None:
    """Return the trial that comes next, as `number`; None if none does before others end.

    The search ends when trials, budget or points are spent, or too many have failed. Then the best
    points are trained again with fresh seeds, beside the default.
    """
    begun = searched(tried)
    if _is_searching(sweep, begun):
        with suppress(ConfigError):  # no point is left
            return propose(sweep, begun, number)
    if any(each.outcome is None for each in begun):
        return None
    again = confirming(tried)
    for each in _confirmations(sweep, begun):
        same = (each.repeats, each.seed)
        if _is_due([one for one in again if (one.trial.repeats, one.trial.seed) == same]):
            return dataclasses.replace(each, number=number)
    return None


def _is_due(same: Sequence[BegunTrial]) -> bool:
    """Return whether a trial that must not be missing is to begin; a failed one begins twice."""
    return len(same) < _AGAIN and all(each.outcome and each.score is None for each in same)


def has_ended(sweep: Sweep, tried: Sequence[BegunTrial]) -> bool:
    """True if no trial is left to run, and the best points are confirmed or not, if ever."""
    ran = all(each.outcome for each in tried) and not _is_searching(sweep, searched(tried))
    decided = not sweep.search.confirm or sweep.sweep_paths.outcome_json.exists()
    return ran and decided and next_trial(sweep, tried, number=0) is None


def _is_searching(sweep: Sweep, begun: Sequence[BegunTrial]) -> bool:
    """Return whether trials of the search are left to begin; asks no model for a point."""
    if sweep.record.candidates:
        return _due_candidate(sweep, begun) is not None
    failed = sum(each.outcome is not None and each.score is None for each in begun)
    if sweep.budget_left(begun) <= 0 or failed >= sweep.search.max_failures:
        return False
    points = [each.trial.point for each in begun]
    return sweep.search.method != "grid" or any(p not in points for p in grid_points(sweep.space))


def _due_candidate(sweep: Sweep, begun: Sequence[BegunTrial]) -> CompetingText | None:
    """The first candidate that has no trial, or only one that failed."""
    for each in sweep.record.candidates:
        if _is_due([one for one in begun if one.trial.candidate == each.label]):
            return each
    return None


def propose(sweep: Sweep, begun: Sequence[BegunTrial], number: int) -> Trial:
    """Return the trial that follows from those before it, and from its number.

    Raises ConfigError if there is no further point that a run admits.
    """
    if candidate := _due_candidate(sweep, begun):
        seed, known = sweep.base.seed, sweep.record.sweep
        return Trial(sweep=known, number=number, point={}, seed=seed, candidate=candidate.label)
    ended = [each for each in begun if each.outcome]
    pending = [each for each in begun if not each.outcome]
    for point in sweep.record.starts:
        if _is_due([each for each in begun if each.trial.point == point]):
            break
    else:
        given = SearchInput(
            space=sweep.space,
            history=[sweep.observation(each) for each in ended],
            pending=[each.trial.point for each in pending],
            number=number,
            seed=sweep.base.seed,
            budget_left=sweep.budget_left(begun),
        )
        point = suggest(sweep.search.method, given)
    return Trial(
        sweep=sweep.record.sweep,
        number=number,
        point=point,
        seed=_seed_of(sweep.base.seed, str(number)),
        ended=tuple(each.trial.number for each in ended),
        pending=tuple(each.trial.number for each in pending),
    )


def _confirmations(sweep: Sweep, begun: Sequence[BegunTrial]) -> Iterator[Trial]:
    """The trials that confirm the best points: each of them and the default, with equal seeds."""
    best = _finalists(sweep, begun)
    for k in range(sweep.search.confirm if best else 0):
        seed = _seed_of(sweep.base.seed, f"confirm {k}")
        for each in (None, *best):
            yield Trial(
                sweep=sweep.record.sweep,
                number=0,
                point=each.trial.point if each else {},
                seed=seed,
                confirms=True,
                repeats=each.trial.number if each else None,
            )


def _finalists(sweep: Sweep, begun: Sequence[BegunTrial]) -> list[BegunTrial]:
    """The trials with the best scores, none with the default's or another's point."""
    whole = [each for each in begun if each.score is not None and not each.cut_at]
    ranked = sorted(whole, key=rank)
    different: dict[PPOConfig, BegunTrial | None] = {sweep.base: None}
    for each in ranked:
        different.setdefault(admissible(each.trial.point, sweep.base), each)
    return [each for each in different.values() if each][:_FINALISTS]


def _seed_of(seed: int, purpose: str) -> int:
    """Return the seed of one trial, from the sweep's.

    >>> _seed_of(0, "3") == _seed_of(0, "3") != _seed_of(1, "3")
    True
    """
    return int(hashlib.sha256(f"{seed} {purpose}".encode()).hexdigest()[:7], 16)


def rank(each: BegunTrial) -> tuple[bool, float, int]:
    """The place of a trial among those with a score: whole ones first, of them the best."""
    return each.cut_at > 0, -(each.score or 0.0), each.trial.number
