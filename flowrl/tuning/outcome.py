"""The outcome of a sweep: a comparison of its best points with the default on fresh seeds.

The best of many trials was lucky in part, so the best points are trained again beside the default,
with the same fresh seeds, and their experts play in fresh worlds. A point whose interval of paired
differences lies above zero becomes the skill's settings: a TOML file below `tuned/` in the graph.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from flowrl import storage
from flowrl.config import BottomUpConfig, Sandbox, flags
from flowrl.errors import BusyError, ComparingError, LaunchError
from flowrl.experts.store import ExpertStore
from flowrl.launchers import sandbox
from flowrl.launchers.confined import confined_run
from flowrl.measures.objectives import CurvePoint, read_curve
from flowrl.parallel.health import DaemonLock
from flowrl.parallel.recovery import add_known
from flowrl.parallel.skill_sources import SkillSources, record_graph
from flowrl.parallel.training_backend import merge_rule
from flowrl.parallel.training_processor import archive_run, merge_run
from flowrl.paths import GraphPaths, RunPaths, SweepPaths
from flowrl.runs import read_run
from flowrl.skills.graph import SkillGraph
from flowrl.storage import records
from flowrl.storage.records import Natural
from flowrl.tuning.space import admissible
from flowrl.tuning.sweep import expert_number
from flowrl.tuning.trials import BegunTrial, Sweep, Trial, confirming, open_sweep

_COMPARING_SECONDS = 0.5
EPISODES, FRESH_SEED = 256, 3_000_017  # of the worlds in which points are confirmed
_Count = Annotated[int, records.within(0, EPISODES)]
Told = TypeVar("Told", bound=tuple[Any, ...])
_SURE = 0.95  # that no point without effect is taken, of all that are compared


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """By how much a point scores more than the default, over the same seeds, with its interval."""

    trial: Natural  # which found the point
    point: Mapping[str, Any]
    mean: float
    low: float
    high: float

    @property
    def described(self) -> str:
        """The gain with its interval, for people."""
        return f"trial {self.trial} gains {self.mean:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOutcome:
    """outcome.json of a sweep; `winner` is the trial whose point was confirmed, if one was.

    `best_expert` is the trial with the best expert of that point.
    """

    seeds: Natural
    default: float  # its mean score
    gains: tuple[Gain, ...]
    winner: Natural | None = None
    best_expert: Natural | None = None

    @property
    def best(self) -> Gain | None:
        """The gain of the winner."""
        return next((gain for gain in self.gains if gain.trial == self.winner), None)

    @property
    def described(self) -> str:
        """The confirmed result, for people."""
        return self.best.described if self.best else "nothing confirmed"


def read_outcome(sweep: Sweep) -> SweepOutcome | None:
    """Read what came of a sweep; None before its end."""
    path = sweep.sweep_paths.outcome_json
    return records.read(path, SweepOutcome) if path.exists() else None


def decide(sweep: Sweep, tried: Sequence[BegunTrial], success: Mapping[int, float]) -> SweepOutcome:
    """Compare the points that were trained again with the default, by success in fresh worlds.

    `success` is by number of trial. A seed with which either of the two failed is left out, since
    the machine may have failed it, and so is one tried again, which had another seed. A point with
    less than two seeds left is not compared.
    """
    scores: dict[int | None, dict[int, tuple[float, Trial]]] = {}
    for each in confirming(tried):
        trial = each.trial
        if trial.number in success:
            score = _confirmed_score(sweep, trial.number, success[trial.number])
            scores.setdefault(trial.repeats, {})[trial.seed] = score, trial
    default = {seed: score for seed, (score, _) in scores.get(None, {}).items()}
    others = {number: trials for number, trials in scores.items() if number is not None}
    gains, experts = [], {}
    for number, trials in others.items():
        pairs = [trials[seed][0] - default[seed] for seed in sorted(trials.keys() & default.keys())]
        _, best = max(trials.values(), key=lambda pair: pair[0])
        experts[number] = best.number
        if len(pairs) > 1:
            mean, low, high = paired_interval(pairs, share=1 - (1 - _SURE) / len(others))
            gains.append(Gain(trial=number, point=best.point, mean=mean, low=low, high=high))
    won = max((gain for gain in gains if gain.low > 0), key=lambda gain: gain.mean, default=None)
    return SweepOutcome(
        seeds=len(default),
        default=statistics.fmean(default.values()) if default else 0.0,
        gains=tuple(gains),
        winner=won.trial if won else None,
        best_expert=experts[won.trial] if won else None,
    )


def success_in_fresh_worlds(
    sweep: Sweep, tried: Sequence[BegunTrial], *, how: Sandbox
) -> dict[int, float]:
    """Let the experts of trials that confirm play, all in the same worlds.

    Returns the share of episodes that succeed, by number of trial; without those that failed, if
    only once, since a later attempt has another seed. Raises ConfinedError or LaunchError.
    """
    ended = [each.trial.number for each in confirming(tried) if each.score is not None]
    numbers = tuple(number for number in ended if read_run(sweep.run(number)).attempt == 1)
    order = EvaluateTrials(sweep=sweep.sweep_paths.root.absolute(), numbers=numbers)
    counts = played(sweep, order, tuple[_Count, ...], how=how)
    return {number: count / EPISODES for number, count in zip(numbers, counts, strict=True)}


def played(sweep: Sweep, order: EvaluateTrials, kind: type[Told], *, how: Sandbox) -> Told:
    """Return what a confined process prints that lets experts of trials play, read as `kind`."""
    if not order.numbers:
        return records.from_json(kind, [])
    run, episodes = read_run(sweep.run(order.numbers[0])), EPISODES * len(order.numbers)
    graph_paths = GraphPaths(sweep.sweep_paths.root.absolute())
    printed = confined_run(order, graph_paths, run, how=how, episodes=episodes)
    try:
        told = records.from_json(kind, json.loads(printed.rpartition(b"\n")[2]))
    except ValueError as error:
        raise LaunchError(f"the evaluation of trials is malformed: {error}") from error
    if len(told) != len(order.numbers):
        raise LaunchError("the evaluation of trials is malformed: it has another number of them")
    return told


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateTrials:
    """The order to let trials' experts play; the last line has their successes, a JSON list."""

    sweep: Path
    numbers: tuple[Natural, ...]

    def work(self) -> int:
        """Play in this process."""
        from flowrl.evaluation import evaluate_runs

        sweep = open_sweep(SweepPaths(self.sweep))
        places = [sweep.run(number) for number in self.numbers]
        reports = evaluate_runs(places, episodes=EPISODES, seed=FRESH_SEED)
        sys.stdout.write("\n" + json.dumps([report.steps[-1].successes for report in reports]))
        return 0


def _confirmed_score(sweep: Sweep, number: int, success: float) -> float:
    """The score of a trial with its success in fresh worlds.

    A run stops as soon as its episodes succeed often enough, so its last success says too much.
    """
    curve = read_curve(sweep.run(number).metrics)
    last = curve[-1] if curve else CurvePoint(0, 0.0, 0.0, 0.0)
    end = last._replace(frames=last.frames + 1, success=success)
    return sweep.score((*curve, end), success)


def paired_interval(pairs: Sequence[float], *, share: float) -> tuple[float, float, float]:
    """Return the mean of two or more paired differences and its interval, by Student's t.

    >>> [round(each, 3) for each in paired_interval([0.1, 0.2, 0.3], share=0.95)]
    [0.2, -0.048, 0.448]
    """
    from scipy.special import stdtrit  # a quarter of a second that other commands can do without

    mean = statistics.fmean(pairs)
    error = statistics.stdev(pairs) / math.sqrt(len(pairs))
    half = float(stdtrit(len(pairs) - 1, 0.5 + share / 2)) * error
    return mean, mean - half, mean + half


def apply_winner(graph_paths: GraphPaths, sweep: Sweep, outcome: SweepOutcome) -> str:
    """Make the confirmed point the skill's settings; returns a line for people."""
    gain, skill, name = outcome.best, sweep.record.skill, sweep.sweep_paths.root.name
    if gain is None:
        tuned, own = graph_paths.tuned_file(skill), _first_words(name).encode()
        if tuned.exists() and storage.read_bytes(tuned).startswith(own):
            storage.remove_file(tuned)  # confirmed before the sweep was prolonged
        kept = "settings by another sweep" if tuned.exists() else "defaults"
        return f"no point is confirmed better than the default; the {kept} of {skill} stay"
    said = f"{gain.described} over the default's {outcome.default:.3f}, "
    said += f"with {outcome.seeds} fresh seeds"
    default, tuned = flags(sweep.base), flags(admissible(gain.point, sweep.base))  # as trained
    point = {key: value for key, value in tuned.items() if value != default[key]}
    point.update(gain.point)
    values = "".join(f"{key} = {json.dumps(value)}\n" for key, value in point.items())
    storage.make_dir(graph_paths.tuned)
    text = f"{_first_words(name)}{said}\n[{json.dumps(skill)}]\n{values}"
    storage.write_atomic(graph_paths.tuned_file(skill), text)
    return f"{said}; these are the settings of {skill} now ({graph_paths.tuned_file(skill)})"


def _first_words(name: str) -> str:
    return f"# flowrl sweep --name {name}: "


def forget(graph_paths: GraphPaths, skill: str) -> str:
    """Remove the settings that a sweep has found for a skill; returns a line for people."""
    there = graph_paths.tuned_file(skill).exists()
    storage.remove_file(graph_paths.tuned_file(skill))
    return f"{skill} has {'its defaults again' if there else 'no settings of a sweep'}"


def keep_winner(
    graph_paths: GraphPaths,
    sweep: Sweep,
    outcome: SweepOutcome,
    *,
    config: BottomUpConfig,
    skills: SkillGraph,
) -> str:
    """Merge the best expert of the confirmed point into the graph, once; returns a line.

    The trial's folder is copied to where a run of the graph lies, and merged as one, by the rule
    that the flags say. The skill is completed then, and its text is kept. Raises BusyError if a
    scheduler trains the graph, or the skill has a run there.
    """
    if outcome.best_expert is None:
        return "no point is confirmed, so no expert is kept"
    skill, number = sweep.record.skill, sweep.record.expert
    if keep_expert(graph_paths, sweep, outcome.best_expert, config=config, skills=skills):
        return f"expert {number} of {skill} is that of trial {outcome.best_expert}"
    return (
        f"no expert is kept: the graph has numbered its experts since the sweep began, "
        f"and {number} is not {skill}'s; flowrl train trains it as was confirmed"
    )


def keep_expert(
    graph_paths: GraphPaths,
    sweep: Sweep,
    trial: int,
    *,
    config: BottomUpConfig,
    skills: SkillGraph,
) -> bool:
    """Merge a trial's expert into the graph as `keep_winner` does.

    Returns False, and keeps nothing, if its number is another skill's now.
    """
    source, skill = sweep.run(trial), sweep.record.skill
    run, lock = read_run(source), DaemonLock(graph_paths.daemon_lock, shared=None)
    lock.acquire()
    try:
        if run.run_id not in ExpertStore(graph_paths).manifest().merged:
            if expert_number(graph_paths, skill) != run.expert:
                return False
            run_paths = _copied(source, graph_paths.run(run.expert, skill))
            record_graph(graph_paths, sweep.base)
            SkillSources(graph_paths).record(skills.skills[skill])
            _merge(graph_paths, run_paths, skill, config)
        add_known(graph_paths, skills)
    finally:
        lock.release()
    return True


def _merge(
    graph_paths: GraphPaths, run_paths: RunPaths, skill: str, config: BottomUpConfig
) -> None:
    """Merge a run as a graph's own; waits for the comparison that the rule may ask for."""
    confinement = sandbox.confinement(config.launch.sandbox, graph_paths.root)
    accounting, rule = config.ppo.frame_accounting, merge_rule(config.graph)
    while True:
        try:
            merge_run(
                ExpertStore(graph_paths),
                run_paths,
                skill,
                accounting=accounting,
                rule=rule,
                confinement=confinement,
            )
        except ComparingError:
            time.sleep(_COMPARING_SECONDS)
        else:
            return archive_run(graph_paths, run_paths)


def _copied(source: RunPaths, run_paths: RunPaths) -> RunPaths:
    """Copy a trial's folder to where a run of the graph lies; of this very run it may be there."""
    if not run_paths.folder.exists():
        with storage.building(run_paths.folder) as copy:
            storage.copy_tree(source.folder, copy, left_out=[])
    elif read_run(run_paths).run_id != read_run(source).run_id:
        raise BusyError(f"{run_paths.folder} is another run of the skill; let it end first")
    return run_paths
