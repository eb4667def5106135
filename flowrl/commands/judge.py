"""`flowrl judge`, its flags and output: a leaf, because judges load jax or a client.

Episodes run skill code, so a confined process of its own plays them and writes a recording; this
process reads it and judges.
"""

from __future__ import annotations

import json
import logging
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
from flowrl.games.base import find_game
from flowrl.judging import calibration
from flowrl.judging.calibration import Calibration
from flowrl.judging.ensemble import fit_ensemble
from flowrl.judging.judge import (
    Cost,
    Item,
    JudgeUnavailableError,
    Recording,
    RuleJudge,
    SkillText,
)
from flowrl.parallel.skill_sources import SkillSources
from flowrl.paths import GraphPaths
from flowrl.runs import TrainingRun, read_result, read_run
from flowrl.skills.skill import Skill, load_library
from flowrl.storage import records
from flowrl.storage.records import Natural, Share

Member = Literal["rule", "logistic", "transformer", "openai", "dspy"]
JudgeName = Literal[Member, "learned", "ensemble"]
_READERS = ("openai", "dspy")  # they judge texts; beside others, descriptions of episodes
_FEWEST, _CHANGED = 8, 20  # episodes to judge at least, and texts that are changed in form
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeReport:
    """`judging/<judge>.json`: what was measured of a judge, and what it says of each skill."""

    generation: Natural
    calibration: Calibration
    scores: Mapping[str, Share]  # of the skill's episodes on average, or of its text


class Study(NamedTuple):
    """Items whose labels are known; rows to learn from, to tune by, to measure by."""

    kind: str
    items: Sequence[Item]
    labels: np.ndarray
    learn: np.ndarray
    tune: np.ndarray
    test: np.ndarray
    own: Mapping[str, np.ndarray]  # rows of each skill
    skills: Sequence[Skill] = ()  # of the items, if they are texts

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
    """Members of an ensemble. Beside others, openai and dspy read episodes, too."""
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
    dspy_compiler: Literal["bootstrap", "mipro"] = "bootstrap"
    """How dspy makes its prompt: with chosen examples, or also with instructions of its own."""
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
        judging, found = _Judging(self, layout), {}
        names = self._judges()
        for name in names:
            try:
                found[name] = report = judging.report(name)
            except JudgeUnavailableError as error:
                if len(names) == 1:
                    raise
                logger.warning("%s; the others go on without it", error)
                continue
            storage.make_dir(layout.judging)
            records.write(layout.judging / f"{name}.json", report)
            if not self.json:
                scores = (f"  {x}: {score:.3f} by {name}\n" for x, score in report.scores.items())
                sys.stdout.write(f"{_line(report.calibration)}\n{''.join(scores)}")
        if self.json:
            document = {name: _shown(report) for name, report in found.items()}
            sys.stdout.write(json.dumps(document, indent=2) + "\n")
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
    """The graph's runs, the items to judge, and the judges."""

    def __init__(self, flags: JudgeCommand, layout: GraphPaths) -> None:
        self._flags, self._layout = flags, layout
        store = ExpertStore(layout)
        self._generation = (merged := store.manifest()).generation
        named = flags.skills or [version.skill for version in merged.experts.values()]
        if not named:
            raise ConfigError(f"{layout.root} has no merged skill yet; train one first")
        archives = [store.archive_of(skill) for skill in named]
        self._runs = {run.skill: run for run in map(read_run, archives)}
        self._results = dict(zip(self._runs, map(read_result, archives), strict=True))

    def report(self, name: str) -> JudgeReport:
        """Measure a judge, and let it score each skill."""
        members = self._flags.models if name == "ensemble" else (name,)
        study = self._texts if set(members) <= set(_READERS) else self._episodes
        judge = self._judge(name, study)
        tuned, unseen = (
            (calibration.scores_of(judge, items), labels)
            for items, labels in map(study.at, (study.tune, study.test))
        )
        found = calibration.measure(judge, study.kind, unseen, tuned=tuned)
        scores = {}
        for skill, rows in study.own.items():
            said = calibration.scores_of(judge, study.at(rows)[0])
            if not np.isnan(said).all():
                scores[skill] = float(np.nanmean(calibration.scaled(said, found.temperature)))
        if study.skills:
            skills = [study.skills[row] for row in study.test[:_CHANGED]]
            again = self._flags.benchmark and name in _READERS
            anew = judge.without_answers() if again else None
            found = replace(found, changes=calibration.changes(judge, skills, anew))
        return JudgeReport(generation=self._generation, calibration=found, scores=scores)

    @cached_property
    def _episodes(self) -> Study:
        """The first half of a usual episode of each that was played, and how it ended."""
        found = [self._recorded(run).prefixes() for run in self._runs.values()]
        items = [item for some, _ in found for item in some]
        labels = np.concatenate([outcomes for _, outcomes in found])
        if len(items) < _FEWEST:
            raise ConfigError(
                f"only {len(items)} episodes last long enough to be judged, and {_FEWEST} are "
                "needed; raise --episodes"
            )
        names = np.array([item.skill for item in items])
        own = {skill: np.flatnonzero(names == skill) for skill in self._runs}
        return Study(
            "episode", items, labels, *calibration.split(len(items), self._flags.seed), own
        )

    @cached_property
    def _texts(self) -> Study:
        """The library's and the graph's skills, and their mutants; half of them are unseen."""
        run = next(iter(self._runs.values()))
        game = find_game(run.config["env_name"])
        library = load_library(game.name)
        known = SkillSources(self._layout).over(library)
        known = {name: known[name] for name in known if name in library or name in self._runs}
        reached = {
            skill: result.success_rate >= self._runs[skill].config["success_state_rate"]
            for skill, result in self._results.items()
        }
        skills, labels = calibration.labelled_texts(known.values(), game, reached)
        order = np.random.default_rng(self._flags.seed).permutation([*known])
        seen = np.isin([skill.name for skill in skills], order[: len(order) // 2])
        learn, test = np.flatnonzero(seen), np.flatnonzero(~seen)
        own = {name: np.array([skills.index(known[name])]) for name in self._runs if name in known}
        texts = [SkillText.of(skill) for skill in skills]
        return Study("text", texts, labels, learn, learn, test, own, skills)

    def _judge(self, name: str, study: Study) -> Any:
        """Make a judge; what it needs is loaded now."""
        flags = self._flags
        if name == "rule":
            return RuleJudge(self._results)
        if name == "ensemble":
            return fit_ensemble(
                [self._judge(x, study) for x in flags.models], *study.at(study.tune)
            )
        items, labels = study.at(study.learn)
        if name in _READERS:
            return self._reader(name, items, labels)
        from flowrl.judging import learned

        small = learned.fit_logistic(items, labels)
        if name == "logistic":
            return small
        large = learned.fit_transformer(items, labels, seed=flags.seed)
        if name == "transformer":
            return large
        return learned.better(small, large, *study.at(study.tune))

    def _recorded(self, run: TrainingRun) -> Recording:
        """Episodes of a run's plan, played by a process of their own."""
        flags, root = self._flags, self._layout.root
        order = RecordEpisodes(
            graph_path=root, skill=run.skill, episodes=flags.episodes, seed=flags.seed
        )
        how = flags.sandbox
        child = confined_run(order, self._layout, run, how=how, stdout=subprocess.PIPE)
        if child.returncode:
            raise FlowrlError(f"the episodes of {run.skill} could not be played; see above")
        return Recording.from_bytes(run.skill, child.stdout)

    def _reader(self, name: str, items: Sequence[Item], labels: np.ndarray) -> Any:
        """A judge that reads texts; its client is imported now.

        Raises:
          ConfigError: the client is not installed, or the endpoint, model or key is missing.
        """
        flags, folder = self._flags, self._layout.judging
        calls, tokens, seconds = flags.judge_budget
        try:
            from flowrl.judging.openai import Endpoint, OpenAIJudge

            if name == "dspy":
                from flowrl.judging.dspy import DSPyJudge
        except ImportError as error:
            extra = "llm" if name == "openai" else "dspy"
            raise ConfigError(
                f"--judge {name} needs pip install 'flowrl[{extra}]': {error}"
            ) from error
        endpoint = Endpoint(
            base_url=flags.base_url,
            model=flags.model,
            budget=Cost(calls=calls, tokens=tokens, seconds=seconds),
            answers=folder / "answers",
            timeout_seconds=flags.judge_timeout,
        )
        if name == "openai":
            return OpenAIJudge(endpoint)
        judge = DSPyJudge(endpoint)
        storage.make_dir(folder)
        judge.compile(items, labels, folder / "program.json", flags.dspy_compiler)
        return judge


def _shown(report: JudgeReport) -> dict[str, Any]:
    found = records.to_json(report)
    found["calibration"]["advisory"] = report.calibration.advisory
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
