"""A contest between texts of one skill: they are trained side by side and play in the same worlds.

It is a sweep whose trials are candidates. All have the same seed, frames and launcher, and differ
in their text. So it goes on after a kill as a sweep does.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import secrets
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

from flowrl import config as configs
from flowrl import storage
from flowrl.config import BottomUpConfig
from flowrl.console import RUNS_GO_ON
from flowrl.errors import EXIT_RESUMABLE, ConfigError, FlowrlError
from flowrl.experts.merge import wilson
from flowrl.experts.store import ExpertStore
from flowrl.measures.causes import explanation_of_run
from flowrl.measures.objectives import read_curve
from flowrl.parallel.skill_sources import SkillConfig, skill_configs, trained_skills
from flowrl.paths import GraphPaths, RunPaths, SweepPaths, slug
from flowrl.runs import read_result, read_run
from flowrl.skills.graph import SkillGraph
from flowrl.storage import records
from flowrl.storage.records import Natural, Positive, Share, within
from flowrl.tuning.outcome import EPISODES, FRESH_SEED, EvaluateTrials, keep_expert, played
from flowrl.tuning.running import publish, run_trials, trial_scheduler
from flowrl.tuning.search import SearchConfig
from flowrl.tuning.start import OF_TRIALS
from flowrl.tuning.sweep import create_sweep, expert_number
from flowrl.tuning.trials import CompetingText, Sweep, SweepRecord, open_sweep, read_trials

_SHOWN = 60  # characters of a term
_MOST_TOLD = 16
_POINTS = 8  # of a curve


class ContestStoppedError(FlowrlError):
    """A contest is stopped before its end; the same command goes on with it."""

    exit_code = EXIT_RESUMABLE


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """A term of a reward's sum over the timesteps of its skill's step, in fresh worlds."""

    source: str
    mean: float
    spread: float  # standard deviation
    share: Share  # of timesteps in which it is not 0

    @property
    def line(self) -> str:
        """The term in a table, for people."""
        figures = f"{self.mean:.3g} ± {self.spread:.3g}, not 0 in {self.share:.1%}"
        return f"    {self.source[:_SHOWN]}: {figures}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SuccessAt:
    """The success of the newest episodes in training after so many frames."""

    frames: Natural
    success: Share


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """The result of a candidate; one that failed twice has no `trial`, and `why`.

    `frames` are those of its run, which ends early at the goal. `loss` says in which step of the
    plan most of its episodes ended, and what helps against that.
    """

    label: str
    trial: Natural | None = None
    successes: Natural = 0
    episodes: Positive = EPISODES
    frames: Natural = 0
    why: str = ""
    curve: tuple[SuccessAt, ...] = ()
    loss: str = ""
    terms: tuple[Term, ...] = ()

    @property
    def rate(self) -> float:
        """The share of its episodes in fresh worlds that succeeded."""
        return self.successes / self.episodes

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % bounds of that share, by Wilson; both are 0 without a trial."""
        return wilson(self.successes, self.episodes) if self.trial is not None else (0.0, 0.0)

    @property
    def facts(self) -> dict[str, Any]:
        """The row of a table, as JSON values."""
        low, high = self.interval
        return {
            "candidate": self.label,
            "success_rate": self.rate,
            "low": low,
            "high": high,
            "frames": self.frames,
            "why": self.why,
            "curve": [asdict(point) for point in self.curve],
            "loss": self.loss,
            "terms": [asdict(term) for term in self.terms],
        }

    @property
    def lines(self) -> tuple[str, ...]:
        """The row of a table, for people, and the terms of a reward that is a sum."""
        if self.trial is None:
            return (f"  {self.label}: {self.why}",)
        low, high = self.interval
        said = f"{self.rate:.1%} [{low:.1%}, {high:.1%}] success after {self.frames:,} frames"
        terms = self.terms if len(self.terms) > 1 else ()
        losses = (f"    {self.loss}",) if self.loss else ()
        return (f"  {self.label}: {said}", *losses, *(term.line for term in terms))


@dataclass(frozen=True, slots=True, kw_only=True)
class ContestOutcome:
    """contest.json: the candidates, as `ranked` has them."""

    standings: tuple[Standing, ...]

    @property
    def lines(self) -> tuple[str, ...]:
        """The rows of a table, for people."""
        return tuple(line for each in self.standings for line in each.lines)

    def of(self, label: str) -> Standing:
        """The result of one candidate."""
        return next(each for each in self.standings if each.label == label)


def ranked(standings: Iterable[Standing], *, budget: int) -> tuple[Standing, ...]:
    """The candidates, the best first.

    Those whose interval reaches the highest lower bound are as good as the best: the one with the
    fewest frames is first, as a run ends at its goal. The others follow by their lower bounds.
    """
    by_bound = sorted(standings, key=lambda each: (each.trial is None, -each.interval[0]))
    least = by_bound[0].interval[0]
    equal = [each for each in by_bound if each.trial is not None and each.interval[1] >= least]
    equal.sort(key=lambda each: min(each.frames, budget))
    return (*equal, *(each for each in by_bound if each not in equal))


def earlier_standings(graph_paths: GraphPaths, skill: str) -> list[Standing]:
    """The results of a skill's contests that have ended, the newest contest's first, at most 16."""
    files = graph_paths.sweeps.glob(f"{_folder(skill)}_????????/contest.json")
    newest = sorted(files, key=lambda file: file.stat().st_mtime_ns, reverse=True)
    found = [each for file in newest for each in records.read(file, ContestOutcome).standings]
    return found[:_MOST_TOLD]


def _folder(skill: str) -> str:
    return f"texts_{slug(skill)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Played:
    """The successes of a candidate's expert, and the terms of its reward."""

    successes: Annotated[int, within(0, EPISODES)] = 0
    terms: tuple[Term, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateCandidates(EvaluateTrials):
    """The order to let candidates' experts play; the last line has a JSON list of `_Played`."""

    def work(self) -> int:
        """Play in this process."""
        from flowrl.evaluation import evaluate_candidates

        sweep = open_sweep(SweepPaths(self.sweep))
        places = [sweep.run(number) for number in self.numbers]
        names = ("source", "mean", "spread", "share")
        found = [
            {"successes": won, "terms": [dict(zip(names, each, strict=True)) for each in terms]}
            for won, terms in evaluate_candidates(places, episodes=EPISODES, seed=FRESH_SEED)
        ]
        sys.stdout.write("\n" + json.dumps(found))
        return 0


@dataclass(frozen=True, kw_only=True)
class Contest:
    """Candidates of one skill: by its label, the graph that has each of them.

    `config` is how the graph was trained last, `frames` bounds each run, `most` the runs side by
    side.
    """

    graph_paths: GraphPaths
    config: BottomUpConfig
    skill: str
    graphs: Mapping[str, SkillGraph]
    frames: int
    most: int

    @functools.cached_property
    def paths(self) -> SweepPaths:
        """The folder, whose name is of all that the result depends on."""
        graphs = self.graphs.items()
        steps = {label: [[s.skill, s.count] for s in g.plan(self.skill)] for label, g in graphs}
        texts = [[label, g.skills[self.skill].to_json(), steps[label]] for label, g in graphs]
        told = [texts, [configs.to_json(each.ppo) for each in self._settings.values()]]
        digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:8]
        return SweepPaths(self.graph_paths.sweeps / f"{_folder(self.skill)}_{digest}")

    @functools.cached_property
    def training(self) -> BottomUpConfig:
        """The settings of all trials."""
        limits = {"max_parallel_skills": self.most, "auto_scaling": False}
        limits |= {"max_retries": 1, "scheduler_poll_interval": 2.0}
        return configs.with_flags(self.config, **OF_TRIALS, **limits)

    def missing(self) -> str:
        """Return the first skill without an expert that a candidate needs, "" if all have one."""
        merged = trained_skills(self.graph_paths)
        graphs = self.graphs.values()
        needs = (need for graph in graphs for need in graph.all_needs(self.skill))
        return next((need for need in needs if need not in merged), "")

    def keep_expert(self, best: Standing) -> bool:
        """Merge the winner's expert into the graph; raises and returns as `outcome.keep_expert`."""
        assert best.trial is not None
        graph, sweep = self.graphs[best.label], open_sweep(self.paths)
        kept: dict[str, Any] = {"config": self.training, "skills": graph}
        return keep_expert(self.graph_paths, sweep, best.trial, **kept)

    def reached(self, best: Standing) -> bool:
        """Return whether the run of a candidate has ended at its goal."""
        assert best.trial is not None
        result = read_result(open_sweep(self.paths).run(best.trial))
        return result.success_rate >= self._settings[best.label].ppo.success_state_rate

    def run(self) -> ContestOutcome:
        """Train and measure the candidates; what is done already is not done again.

        A result is measured anew once the experts have changed that candidates begin with.

        Raises ContestStoppedError if a user stops it, else what a sweep raises: BusyError,
        ConfigError, SkillError, LaunchError.
        """
        if self.paths.contest_json.exists():
            outcome = records.read(self.paths.contest_json, ContestOutcome)
            if self._holds(outcome):
                return outcome
            storage.remove_tree(self.paths.root)
        if need := self.missing():
            train = self.graph_paths.command("train", "--target_skill", need)
            raise ConfigError(f"{self.skill} needs {need}, which has no expert yet; {train}")
        how: dict[str, Any] = {"graph_paths": self.graph_paths, "training": self.training}
        opened = trial_scheduler(self.paths, self.skill, self.graphs.values(), **how)
        with opened as (scheduler, confinement):
            known = self.paths.sweep_json.exists()
            sweep = open_sweep(self.paths) if known else Sweep(self.paths, self._record())
            if not known:
                create_sweep(sweep, self.graph_paths, *self.graphs.values())
            how = {"training": self.training, "confinement": confinement}
            try:
                run_trials(sweep, self.graphs, scheduler, **how)
            except KeyboardInterrupt:
                sys.stderr.write(f"\nflowrl: {RUNS_GO_ON}\nTo go on: the same command\n")
                raise
            return self._measured(sweep)

    def _holds(self, outcome: ContestOutcome) -> bool:
        """Return whether a kept result is of the experts that the graph has now.

        Keeping the winner's expert changes those of its needs, too.
        """
        pinned, now = (ExpertStore(each).manifest() for each in (self.paths, self.graph_paths))
        sweep = open_sweep(self.paths)
        trials = (each.trial for each in outcome.standings if each.trial is not None)
        kept = any(read_run(sweep.run(trial)).run_id in now.merged for trial in trials)
        return kept or pinned.versions <= now.versions

    @functools.cached_property
    def _settings(self) -> Mapping[str, SkillConfig]:
        """The settings of each candidate; ConfigError if they make no sense together."""
        settings, frames = {}, {"total_timesteps": self.frames}
        for name, graph in self.graphs.items():
            own = skill_configs(self.training, graph.skills)[self.skill]
            settings[name] = replace(own, ppo=configs.with_flags(own.ppo, **frames))
        return settings

    def _record(self) -> SweepRecord:
        first, *_ = self._settings.values()
        candidates = tuple(
            CompetingText(label=name, config=configs.to_json(each.ppo))
            for name, each in self._settings.items()
        )
        search = SearchConfig(method="grid", trials=len(candidates), confirm=0)
        return SweepRecord(
            sweep=secrets.token_hex(8),
            skill=self.skill,
            expert=expert_number(self.graph_paths, self.skill),
            flags=configs.to_json(search),
            space={},
            config=configs.to_json(first.ppo),
            origins=first.origins,
            starts=(),
            candidates=candidates,
        )

    def _course(self, run_paths: RunPaths) -> dict[str, Any]:
        """Return the frames of an ended run, its curve, and where its plan loses most.

        An attempt before it that failed counts with none of them.
        """
        curve = read_curve(run_paths.metrics)
        ends = (math.ceil(len(curve) * part / _POINTS) for part in range(1, _POINTS + 1))
        kept = (curve[end - 1] for end in ends if curve)
        points = dict.fromkeys(SuccessAt(frames=each.frames, success=each.success) for each in kept)
        found = explanation_of_run(self.graph_paths, run_paths)
        loss = f"{found.line}; {found.remedy}" if found else ""
        return {"frames": read_result(run_paths).frames, "curve": (*points,), "loss": loss}

    def _measured(self, sweep: Sweep) -> ContestOutcome:
        """Let all experts play in the same worlds, and write down how they rank."""
        tried, _ = read_trials(sweep)
        last = {each.trial.candidate: each for each in tried}
        if last.keys() != self.graphs.keys() or any(each.outcome is None for each in tried):
            raise ContestStoppedError("stopped; the same command goes on")
        good = {name: one.trial.number for name, one in last.items() if one.score is not None}
        order = EvaluateCandidates(sweep=self.paths.root.absolute(), numbers=(*good.values(),))
        found = played(sweep, order, tuple[_Played, ...], how=self.training.launch.sandbox)
        results = dict(zip(good, found, strict=True))
        standings = []
        for name in self.graphs:
            ended, result = last[name].outcome, results.get(name, _Played())
            assert ended
            facts: dict[str, Any] = {"frames": ended.frames, "why": ended.why}
            if (number := good.get(name)) is not None:
                facts |= self._course(sweep.run(number))
            facts |= {"successes": result.successes, "terms": result.terms}
            standings.append(Standing(label=name, trial=good.get(name), **facts))
        outcome = ContestOutcome(standings=ranked(standings, budget=self.frames))
        records.write(self.paths.contest_json, outcome)
        publish(sweep)
        return outcome
