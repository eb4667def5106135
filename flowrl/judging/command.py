"""`flowrl judge`, its flags and output: a leaf, because judges load jax or a client.

Episodes run skill code, so a confined process of its own plays them and writes a recording; this
process reads it and judges.
"""

from __future__ import annotations

import json
import logging
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import tyro

from flowrl import storage
from flowrl.arguments import Count, Frames, Needs, ReportCommand, Seed
from flowrl.config import Sandbox
from flowrl.errors import ConfigError
from flowrl.experts.store import ExpertStore
from flowrl.games.base import find_game
from flowrl.judging import calibration
from flowrl.judging.calibration import Labelled
from flowrl.judging.ensemble import fit_ensemble
from flowrl.judging.judge import Item, JudgeUnavailableError, Recording, RuleJudge, SkillText
from flowrl.judging.report import JudgeReport
from flowrl.launchers.confined import confined_run
from flowrl.llm.exchange import Budget, Cost
from flowrl.parallel.skill_sources import SkillSources
from flowrl.paths import GraphPaths, existing_graph
from flowrl.runs import TrainingRun, read_result, read_run
from flowrl.skills.skill import Skill, load_library
from flowrl.storage import records

Member = Literal["rule", "logistic", "transformer", "openai", "dspy"]
JudgeName = Literal[Member, "learned", "ensemble"]
_MODELS: tuple[Member, ...] = ("rule", "logistic", "transformer")
_READERS = ("openai", "dspy")  # they judge texts; beside others, descriptions of episodes
_OF_READERS = Needs(judge=(*_READERS, "ensemble"), benchmark=True)
_FEWEST, _CHANGED = 8, 20  # episodes to judge, and texts whose form is changed
logger = logging.getLogger(__name__)


class Study(NamedTuple):
    """Items and labels to learn from, tune by and measure by; and what there is of each skill."""

    kind: str
    learn: Labelled
    tune: Labelled
    test: Labelled
    own: Mapping[str, Sequence[Item]]
    skills: Sequence[Skill] = ()  # some whose texts are to measure by, good and bad ones


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
    models: Annotated[tuple[Member, ...], Needs(judge="ensemble")] = _MODELS
    """Members of an ensemble. Beside others, openai and dspy read episodes, too."""
    benchmark: bool = False
    """Measure all judges that can be asked, and ask endpoints again what they have answered."""
    episodes: Count = 512
    """Episodes of each skill to play, each in a world of its own."""
    seed: Seed = 2_000_003
    """Seed of the worlds, of the actions, and of the choice which episodes a judge may see."""
    base_url: Annotated[str, _OF_READERS] = ""
    """Endpoint of openai and dspy; the key is read from OPENAI_API_KEY."""
    model: Annotated[str, _OF_READERS] = ""
    """The endpoint's model."""
    judge_budget: Annotated[tuple[Frames, ...], _OF_READERS] = (500, 1_000_000, 1800)
    """Calls, tokens and seconds that the endpoint may take at most, retries included."""
    sandbox: Sandbox = "auto"
    """Confine the episodes by bubblewrap, with the graph read-only; auto: if it is there."""

    def __call__(self) -> int:
        """Play, judge, measure; print and keep what was found."""
        graph_paths = existing_graph(self.graph_path.absolute())
        if len(self.judge_budget) != 3:
            raise ConfigError("--judge_budget takes calls, tokens and seconds, as 500,1M,1800")
        self._check_models()
        names: tuple[str, ...] = (self.judge,)
        if self.benchmark and self.judge == "learned":
            names = ("rule", "logistic", "transformer", *(["openai"] if self.base_url else []))
        judging, reports = GraphJudging(self, graph_paths, names), {}
        try:
            for name in names:
                try:
                    reports[name] = report = judging.report(name)
                except JudgeUnavailableError as error:
                    if len(names) == 1:
                        raise
                    logger.warning("%s; the others go on without it", error)
                    continue
                storage.make_dir(graph_paths.judging)
                records.write(graph_paths.judging / f"{name}.json", report)
                if not self.json:
                    scores = (f"  {x}: {each:.3f} by {name}\n" for x, each in report.scores.items())
                    sys.stdout.write(f"{report.calibration.line}\n{''.join(scores)}")
        finally:
            if self.json and reports:
                sys.stdout.write(json.dumps(records.to_json(reports), indent=2) + "\n")
        return 0

    def _check_models(self) -> None:
        for name in self.models:
            if self.models.count(name) > 1:
                raise ConfigError(f"--models has {name} twice; name each member once")

    def work(self) -> int:
        """Play a skill's plan in this process, and write the recording to the standard output."""
        from flowrl.evaluation import record

        graph_paths, (skill,) = GraphPaths(self.graph_path), self.skills
        recording = record(graph_paths, skill, episodes=self.episodes, seed=self.seed)
        sys.stdout.buffer.write(recording.to_bytes())
        return 0


class GraphJudging:
    """The graph's runs, the items to judge, and the judges."""

    def __init__(self, flags: JudgeCommand, graph_paths: GraphPaths, names: Sequence[str]) -> None:
        self._flags, self._graph_paths = flags, graph_paths
        store = ExpertStore(graph_paths)
        self._generation = (merged := store.manifest()).generation
        named = flags.skills or [version.skill for version in merged.experts.values()]
        if not named:
            raise ConfigError(f"{graph_paths.root} has no merged skill yet; train one first")
        archives = [store.archive_of(skill) for skill in named]
        if len(set(archives)) < len(archives):
            raise ConfigError("a skill is named twice, perhaps by its number; name each once")
        self._runs = {run.skill: run for run in map(read_run, archives)}
        self._results = dict(zip(self._runs, map(read_result, archives), strict=True))
        self._budget = Budget(Cost(*flags.judge_budget))
        members = {*names, *(flags.models if "ensemble" in names else ())}
        self._readers = {name: self._reader(name) for name in _READERS if name in members}

    def report(self, name: str) -> JudgeReport:
        """Measure a judge, and let it score each skill."""
        members = self._flags.models if name == "ensemble" else (name,)
        study = self._texts if set(members) <= set(_READERS) else self._episodes
        judge = self._judge(name, study)
        reasons: Counter[str] = Counter()
        tuned, unseen = (
            (calibration.scores_of(judge, items, reasons), labels)
            for items, labels in (study.tune, study.test)
        )
        said = {skill: calibration.scores_of(judge, items) for skill, items in study.own.items()}
        moved = {}
        if study.skills:
            again = self._flags.benchmark and name in _READERS
            anew = partial(judge.score, kept=False) if again else None
            moved = calibration.changes(judge, study.skills, anew)
        why = next((why for why, _ in reasons.most_common(1)), "")
        measured = calibration.measure(
            judge, study.kind, unseen, tuned=tuned, moved=moved, abstained=why
        )
        scores = {
            skill: float(np.nanmean(calibration.scaled(each, measured.temperature)))
            for skill, each in said.items()
            if not np.isnan(each).all()
        }
        return JudgeReport(generation=self._generation, calibration=measured, scores=scores)

    @cached_property
    def _episodes(self) -> Study:
        """The first half of a usual episode of each that was played, and how it ended."""
        prefixes = {skill: self.recorded(run).prefixes() for skill, run in self._runs.items()}
        own = {skill: items for skill, (items, _) in prefixes.items()}
        items = [item for some in own.values() for item in some]
        if len(items) < _FEWEST:
            raise ConfigError(
                f"only {len(items)} episodes last long enough to be judged, and {_FEWEST} are "
                "needed; raise --episodes"
            )
        labels = np.concatenate([outcomes for _, outcomes in prefixes.values()])
        learn, tune, test = calibration.split(items, labels, self._flags.seed)
        return Study("episode", learn, tune, test, own)

    @cached_property
    def _texts(self) -> Study:
        """The library's and the graph's skills, and their mutants; half of them are unseen."""
        game = find_game(next(iter(self._runs.values())).config["env_name"])
        library = load_library(game.name)
        known = SkillSources(self._graph_paths).over(library, tell=False)
        reached = {
            skill: result.success_rate >= self._runs[skill].config["success_state_rate"]
            for skill, result in self._results.items()
        }
        names = sorted(known.keys() & (library.keys() | reached.keys()))
        order = [known[name] for name in np.random.default_rng(self._flags.seed).permutation(names)]
        seen, unseen = order[: len(order) // 2], order[len(order) // 2 :]
        learn, test = (calibration.labelled_texts(some, game, reached) for some in (seen, unseen))
        if gone := reached.keys() - known.keys():
            raise ConfigError(
                f"{', '.join(sorted(gone))}: the text is neither in the library nor in "
                f"{self._graph_paths.root}; name the skills to judge"
            )
        own = {name: [SkillText.of(known[name])] for name in reached}
        both = [x for one in unseen for x in (one, *calibration.mutants(one, game).values())]
        return Study("text", learn, learn, test, own, both[:_CHANGED])

    def recorded(self, run: TrainingRun) -> Recording:
        """Episodes of a run's plan, played by a process of their own, which needs no endpoint."""
        flags, root = self._flags, self._graph_paths.root
        order = replace(flags, graph_path=root, skills=(run.skill,), base_url="")
        logger.info("%s: playing %d episodes", run.skill, flags.episodes)
        how, episodes = flags.sandbox, flags.episodes
        printed = confined_run(order, self._graph_paths, run, how=how, episodes=episodes)
        recording = Recording.from_bytes(run.skill, printed)
        logger.info(
            "%s: %d of %d failed", run.skill, (~recording.success).sum(), len(recording.success)
        )
        return recording

    def _judge(self, name: str, study: Study) -> Any:
        """Make a judge; what it needs is loaded now."""
        if name == "rule":
            return RuleJudge(self._results)
        if name == "ensemble":
            return fit_ensemble([self._judge(x, study) for x in self._flags.models], *study.tune)
        if name in _READERS:
            reader = self._readers[name]
            if name == "dspy":
                storage.make_dir(folder := self._graph_paths.judging)
                reader.compile(*study.learn, folder / "program.json")
            return reader
        from flowrl.judging import learned

        small = learned.fit_logistic(*study.learn)
        if name == "logistic":
            return small
        large = learned.fit_transformer(*study.learn, seed=self._flags.seed)
        return large if name == "transformer" else learned.better(small, large, *study.tune)

    def _reader(self, name: str) -> Any:
        """A judge that reads texts; ConfigError if its client, imported now, is missing."""
        try:
            if name == "openai":
                from flowrl.judging.openai import OpenAIJudge as Reader
            else:
                from flowrl.judging.dspy import DSPyJudge as Reader
        except ImportError as error:
            extra = f"pip install '.[{'llm' if name == 'openai' else name}]' in flowrl's folder"
            raise ConfigError(f"--judge {name} needs {extra}: {error}") from error
        answers = self._graph_paths.judging / "answers"
        return Reader(self._flags.base_url, self._flags.model, self._budget, answers)
