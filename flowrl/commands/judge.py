"""`flowrl judge`, its flags and output: a leaf, because judges load jax or a client.

Episodes run skill code, so a confined process of its own plays them and writes a recording; this
process reads it and judges.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import tyro

from flowrl import storage
from flowrl.arguments import ReportCommand
from flowrl.commands.evaluate import confined_run
from flowrl.commands.repair import existing_graph
from flowrl.config import Positive, Sandbox
from flowrl.errors import ConfigError, FlowrlError
from flowrl.experts.store import ExpertStore
from flowrl.games.base import Game, find_game
from flowrl.judging import calibration
from flowrl.judging.calibration import Calibration, Changes
from flowrl.judging.ensemble import fit_ensemble
from flowrl.judging.judge import BudgetedJudge, Cost, Item, Judge, Recording, RuleJudge, SkillText
from flowrl.parallel.skill_sources import SkillSources
from flowrl.paths import GraphPaths
from flowrl.runs import TrainingRun, read_result, read_run
from flowrl.skills.skill import Skill, load_library
from flowrl.storage import records
from flowrl.storage.records import Natural, Share

Member = Literal["rule", "logistic", "transformer", "openai", "dspy"]
JudgeName = Literal[Member, "learned", "ensemble"]
_READERS = ("openai", "dspy")  # they judge texts, the others episodes


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeReport:
    """`judging/<judge>.json`: what was measured of a judge, and what it says of each skill."""

    generation: Natural
    calibrations: tuple[Calibration, ...]
    scores: Mapping[str, Share]  # of the skill's episodes on average, or of its text


class Study(NamedTuple):
    """Items whose labels are known; rows to learn from, to tune by, to measure by."""

    kind: str
    items: Sequence[Item]
    labels: np.ndarray
    learn: np.ndarray
    tune: np.ndarray
    test: np.ndarray
    skills: Sequence[Skill] = ()  # some of those whose texts are to measure by

    def at(self, rows: np.ndarray) -> tuple[list[Any], np.ndarray]:
        """Items and labels of these rows."""
        return [self.items[row] for row in rows], self.labels[rows]


@dataclass(frozen=True, kw_only=True)
class JudgeCommand(ReportCommand):
    """Score episodes and skills; say how far to trust the scores.

    Examples:
      flowrl judge exp/demo
      flowrl judge exp/demo "Collect Wood" --judge logistic --json
      flowrl judge exp/demo --judge openai --base_url http://localhost:8000/v1 --model m
    """

    skills: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="SKILL")] = ()
    """Skills, by name or expert number; without one, all that are merged."""
    judge: JudgeName = "learned"
    """The judge; learned is the better of logistic and transformer."""
    models: tuple[Member, ...] = ("rule", "logistic", "transformer")
    """Members of an ensemble."""
    benchmark: bool = False
    """Measure all judges that can be asked, and ask endpoints again what they have answered."""
    episodes: Positive = 512
    """Episodes of each skill to play, each in a world of its own."""
    seed: int = 2_000_003
    """Seed of the worlds, of the actions, and of the choice which episodes a judge may see."""
    base_url: str = ""
    """Endpoint of openai and dspy; the key is read from OPENAI_API_KEY."""
    model: str = ""
    """The endpoint's model."""
    judge_budget: tuple[Positive, ...] = (500, 1_000_000, 1800)
    """Calls, tokens and seconds that the endpoint may take at most."""
    judge_timeout: float = 60.0
    """Seconds that an answer may take."""
    sandbox: Sandbox = "auto"
    """Confine the episodes by bubblewrap, with the graph read-only; auto: if it is there."""

    def __call__(self) -> int:
        """Play, judge, measure; print and keep what was found.

        Raises:
          ExpertMissingError: no such skill is merged; says which are.
          JudgeUnavailableError: the judge's endpoint does not answer.
        """
        layout = existing_graph(self.graph_path.absolute())
        if len(self.judge_budget) != 3:
            raise ConfigError("--judge_budget takes calls, tokens and seconds, as 500,1M,1800")
        found = _Judging(self, layout)
        reports = {name: found.report(name) for name in self._judges()}
        storage.make_dir(layout.judging)
        for name, report in reports.items():
            records.write(layout.judging / f"{name}.json", report)
        if self.json:
            document = {name: _shown(report) for name, report in reports.items()}
            sys.stdout.write(json.dumps(document, indent=2) + "\n")
            return 0
        for name, report in reports.items():
            sys.stdout.write("".join(f"{_line(one)}\n" for one in report.calibrations))
            for skill, score in report.scores.items():
                sys.stdout.write(f"  {skill}: {score:.3f} by {name}\n")
        return 0

    def _judges(self) -> tuple[str, ...]:
        if not self.benchmark or self.judge != "learned":
            return (self.judge,)
        return ("rule", "logistic", "transformer", *(["openai"] if self.base_url else []))


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordEpisodes:
    """The order to play episodes of a skill's plan and to write the recording to stdout."""

    graph_path: Path
    skill: str
    episodes: Positive
    seed: int

    def work(self) -> int:
        """Play in this process."""
        from flowrl.evaluate import record

        paths = GraphPaths(self.graph_path)
        found = record(paths, self.skill, episodes=self.episodes, seed=self.seed)
        sys.stdout.buffer.write(found.to_bytes())
        return 0


class _Judging:
    """The judges of a graph, made when they are needed."""

    def __init__(self, flags: JudgeCommand, layout: GraphPaths) -> None:
        self._flags, self._layout = flags, layout
        store = ExpertStore(layout)
        self._generation = (merged := store.manifest()).generation
        named = flags.skills or [version.skill for version in merged.experts.values()]
        if not named:
            raise ConfigError(f"{layout.root} has no merged skill yet; train one first")
        archives = [store.archive_of(skill) for skill in named]
        self._runs: dict[str, TrainingRun] = {}
        self._results = {}
        for place in archives:
            run = read_run(place)
            self._runs[run.skill], self._results[run.skill] = run, read_result(place)
        self._made: dict[tuple[str, str], Judge] = {}

    def report(self, name: str) -> JudgeReport:
        """Measure a judge, and let it score each skill."""
        members = self._flags.models if name == "ensemble" else (name,)
        kinds = sorted({"text" if each in _READERS else "episode" for each in members})
        found = [self._measured(name, kind) for kind in kinds]
        return JudgeReport(
            generation=self._generation,
            calibrations=tuple(measured for measured, _ in found),
            scores={skill: score for _, scores in found for skill, score in scores.items()},
        )

    def _measured(self, name: str, kind: str) -> tuple[Calibration, dict[str, float]]:
        study, judge = self._study(kind), self._judge(name, kind)
        tuned, unseen = (
            calibration.answered([judge.score(item) for item in items], labels)
            for items, labels in (study.at(study.tune), study.at(study.test))
        )
        found = calibration.measure(judge, kind, unseen, asked=len(study.test), tuned=tuned)
        if study.skills:
            found = replace(found, changes=self._changes(judge, study.skills))
        scores = {}
        for skill, items in self._own(study).items():
            said = [one.score for item in items if (one := judge.score(item)).score is not None]
            if said:
                scores[skill] = float(calibration.scaled(said, found.temperature).mean())
        return found, scores

    def _changes(self, judge: Judge, skills: Sequence[Skill]) -> Changes | None:
        if not (self._flags.benchmark and isinstance(judge, BudgetedJudge)):
            return calibration.changes(judge, skills)
        anew = replace(judge, folder=None)
        found = calibration.changes(judge, skills, anew)
        judge.spent += anew.spent
        return found

    def _own(self, study: Study) -> dict[str, list[Item]]:
        """What there is to judge of each skill."""
        if study.kind == "text":
            return {skill: [SkillText.of(one)] for skill, one in self._skills().items()}
        return {skill: [x for x in study.items if x.skill == skill] for skill in self._runs}

    def _skills(self) -> dict[str, Skill]:
        known = SkillSources(self._layout).over(load_library(self._game.name))
        return {skill: known[skill] for skill in self._runs}

    @property
    def _game(self) -> Game:
        return find_game(next(iter(self._runs.values())).config["env_name"])

    @cached_property
    def _episodes(self) -> Study:
        """The first half of a usual episode of each that was played, and how it ended."""
        found = [self._recorded(run).prefixes() for run in self._runs.values()]
        items = [item for some, _ in found for item in some]
        labels = np.concatenate([outcomes for _, outcomes in found])
        return Study("episode", items, labels, *calibration.split(len(items), self._flags.seed))

    @cached_property
    def _texts(self) -> Study:
        """The library's skills and their mutants; those of half the skills are unseen."""
        library = list(load_library(self._game.name).values())
        order = np.random.default_rng(self._flags.seed).permutation(len(library))
        seen = {library[row].name for row in order[: len(order) // 2]}
        skills, labels = calibration.labelled_texts(library, self._game)
        known = np.array([skill.name in seen for skill in skills])
        learn, test = np.flatnonzero(known), np.flatnonzero(~known)
        texts = [SkillText.of(skill) for skill in skills]
        return Study("text", texts, labels, learn, learn, test, [skills[row] for row in test[:20]])

    def _study(self, kind: str) -> Study:
        return self._texts if kind == "text" else self._episodes

    def _judge(self, name: str, kind: str) -> Judge:
        if (name, kind) not in self._made:
            self._made[name, kind] = self._make(name, self._study(kind))
        return self._made[name, kind]

    def _make(self, name: str, study: Study) -> Judge:
        """Make a judge; what it needs is loaded now."""
        flags = self._flags
        if name == "rule":
            return RuleJudge(self._results)
        if name == "ensemble":
            members = [one for one in flags.models if (one in _READERS) == (study.kind == "text")]
            judges = [self._judge(member, study.kind) for member in members]
            return fit_ensemble(judges, *study.at(study.tune))
        if name in _READERS:
            return self._budgeted(_reader(name, flags), study)
        from flowrl.judging import learned

        items, labels = study.at(study.learn)
        small = learned.fit_logistic(items, labels)
        if name == "logistic":
            return small
        large = learned.fit_transformer(items, labels, seed=flags.seed)
        return (
            large if name == "transformer" else learned.better(small, large, *study.at(study.tune))
        )

    def _budgeted(self, judge: Any, study: Study) -> Judge:
        """A judge behind an endpoint, compiled if it can be."""
        calls, tokens, seconds = self._flags.judge_budget
        spent = Cost()
        if hasattr(judge, "compile"):
            storage.make_dir(self._layout.judging)
            program = self._layout.judging / "program.json"
            spent = judge.compile(*study.at(study.learn), program)
        budget = Cost(calls=calls, tokens=tokens, seconds=seconds)
        return BudgetedJudge(judge, budget, self._layout.judging / "answers", spent)

    def _recorded(self, run: TrainingRun) -> Recording:
        """Episodes of a run's plan, played by a process of their own."""
        flags, root = self._flags, self._layout.root
        order = RecordEpisodes(
            graph_path=root, skill=run.skill, episodes=flags.episodes, seed=flags.seed
        )
        how = self._flags.sandbox
        child = confined_run(order, self._layout, run, how=how, stdout=subprocess.PIPE)
        if child.returncode:
            raise FlowrlError(f"the episodes of {run.skill} could not be played; see above")
        return Recording.from_bytes(run.skill, child.stdout)


def _reader(name: str, flags: JudgeCommand) -> Judge:
    """A judge that reads texts; its client is imported now.

    Raises:
      ConfigError: the client is not installed, or the endpoint, model or key is missing.
    """
    try:
        if name == "openai":
            from flowrl.judging.openai import OpenAIJudge as Reader
        else:
            from flowrl.judging.dspy import DSPyJudge as Reader
    except ImportError as error:
        extra = "llm" if name == "openai" else "dspy"
        raise ConfigError(f"--judge {name} needs pip install 'flowrl[{extra}]': {error}") from error
    return Reader(flags.base_url, flags.model, timeout_seconds=flags.judge_timeout)


def _shown(report: JudgeReport) -> dict[str, Any]:
    found = records.to_json(report)
    for one, shown in zip(report.calibrations, found["calibrations"], strict=True):
        shown["advisory"] = one.advisory
    return found


def _line(one: Calibration) -> str:
    """What was measured of a judge, in one line."""
    head = f"{one.judge}, {one.answered} of {one.asked} unseen {one.items}s"
    if one.auc is None or one.ece is None or one.kappa is None:
        return f"{head}: too few labels of either kind to measure it; advisory"
    named = {"AUC": one.auc, "ECE": one.ece, "κ": one.kappa}
    figures = ", ".join(
        f"{name} {each.value:.2f} [{each.low:.2f}, {each.high:.2f}]" for name, each in named.items()
    )
    if one.changes is not None:
        figures += f", moved by {one.changes.instructed:.2f} where a text demands it"
    return f"{head}: {figures}; {'advisory, decides nothing' if one.advisory else 'trusted'}"
