"""`flowrl analyse`: what was played against what skills' files say; its flags and output."""

from __future__ import annotations

import ast
import difflib
import json
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from flowrl import storage
from flowrl.analysis.contracts import (
    Disproof,
    Experiment,
    PlayedStep,
    corrected,
    disproofs,
    experiments_of,
)
from flowrl.api import EPISODES, SEED, evaluate
from flowrl.arguments import Count, ReportCommand, Seed, SkillArgument
from flowrl.config import BottomUpConfig, Sandbox
from flowrl.console import print_report
from flowrl.errors import GraphError
from flowrl.experts.store import ExpertStore
from flowrl.games.base import find_game
from flowrl.launchers.confined import confined_run
from flowrl.measures.episodes import episodes_file, read_episodes
from flowrl.parallel.events import Verb
from flowrl.parallel.health import daemon_of
from flowrl.parallel.recovery import recorded_config
from flowrl.parallel.requests import send_request
from flowrl.parallel.skill_sources import SkillSources, open_graph
from flowrl.paths import GraphPaths, existing_graph
from flowrl.runs import TrainingRun, read_run
from flowrl.skills.graph import SkillGraph
from flowrl.skills.levels import entry_needs
from flowrl.skills.skill import AMOUNTS, ON_FLOOR, Skill, load_library
from flowrl.skills.validation.dry_run import SkillCode
from flowrl.skills.validation.syntax import without_annotations
from flowrl.storage import records
from flowrl.storage.records import Natural

_TOLD = 0.05  # of an amount, on average


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """The steps of one plan's episodes, and the experiments on its goal."""

    steps: tuple[PlayedStep, ...]
    experiments: tuple[Experiment, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SkillAnalysis:
    """A summary of a skill's attempts, and the disproofs of its contract."""

    skill: str
    attempts: int
    successes: int
    timesteps: float
    """The median of the successes'."""
    least: Mapping[str, int]
    """The least seen at the start of the successes, of items and facts."""
    end: Mapping[str, float]
    """The mean at their end."""
    spent: Mapping[str, float]
    """The mean of what they lost on the way."""
    won: Mapping[str, float]
    """The mean of what they won on the way."""
    experiments: tuple[Experiment, ...]
    disproofs: tuple[Disproof, ...]
    diff: str
    """Of the skill's file; empty where nothing is to be changed."""


@dataclass(frozen=True, kw_only=True)
class AnalyseCommand(ReportCommand):
    """Compare skills' contracts with recorded episodes.

    Examples:
      flowrl analyse exp/demo
      flowrl analyse exp/demo "Place Table" --json | jq '.[].disproofs'
      flowrl analyse exp/demo "Place Table" --apply
    """

    skill: SkillArgument = ""
    """The skill's name, or its expert number (default: all that are trained)."""
    episodes: Count = EPISODES
    """Episodes to record of a skill of which none are recorded."""
    experiments: Natural = 128
    """Episodes that are played on without a need, and as many with it; 0 tries none."""
    seed: Seed = SEED
    """Seed of the worlds and actions."""
    apply: bool = False
    """Keep the corrected contracts with the graph; their experts stay."""
    sandbox: Sandbox = "auto"
    """Confine the episodes by bubblewrap, with the graph read-only; auto: if it is there."""

    def __call__(self) -> int:
        """Replay and try in child processes, print, and apply if that is asked; returns 0."""
        graph_paths = existing_graph(self.graph_path)
        config = recorded_config(graph_paths)
        sources = SkillSources(graph_paths)
        graph, store = open_graph(config, sources), ExpertStore(graph_paths)
        trained = {version.skill for version in store.manifest().experts.values()}
        asked = self.skill or next(iter(sorted(trained)), "")
        named = read_run(store.archive_of(asked)).skill  # refused if nothing is trained
        graph.needs(named)  # refused if the graph leaves it out
        names = [named] if self.skill else [name for name in graph.order() if name in trained]
        runs = (read_run(store.archive_of(name)) for name in sorted(trained))
        plans = {run.skill: run for run in runs if {*_steps(run)} <= graph.skills.keys()}
        for name in names:
            self._record(graph_paths, plans[name])
        played = {name: self._played(graph_paths, graph, plans[name], names) for name in plans}
        texts = _texts(config)
        analyses = [_analysis(graph.skills[name], played, config, texts) for name in names]
        lines = [line for each in analyses for line in _lines(each)]
        if self.apply:
            lines += _applied(graph_paths, graph, analyses, trained)
        elif any(each.diff for each in analyses):
            words = (*([self.skill] if self.skill else []), "--apply")
            lines.append(f"to keep this: {graph_paths.command('analyse', *words)}")
        print_report([asdict(each) for each in analyses], lines, as_json=self.json)
        return 0

    def _record(self, graph_paths: GraphPaths, run: TrainingRun) -> None:
        """Record episodes of a skill if none are."""
        if not episodes_file(graph_paths, run).exists():
            number = self.episodes
            sys.stderr.write(f"flowrl: no episode of {run.skill} is recorded: {number} are now\n")
            asked = {"episodes": number, "record": number, "seed": self.seed}
            evaluate(graph_paths.root, run.skill, sandbox=self.sandbox, **asked)

    def _played(
        self, graph_paths: GraphPaths, graph: SkillGraph, run: TrainingRun, names: Sequence[str]
    ) -> Played:
        """Replay a plan's recorded episodes, if any has a step of one of the skills."""
        steps = {*_steps(run)}
        if steps.isdisjoint(names) or not episodes_file(graph_paths, run).exists():
            return Played(steps=(), experiments=())
        read_episodes(graph_paths, run)  # refused now, if it is damaged or of another run
        skill = graph.skills[run.skill]
        game = run.config["env_name"]
        order = AnalyseOrder(
            graph_path=graph_paths.root,
            skill=run.skill,
            facts=_facts(graph, game),
            gains={name: _names(graph.skills[name].gain) for name in steps},
            needs=entry_needs(skill, run.plan[-1].count),
            episodes=self.experiments if run.skill in names else 0,
            seed=self.seed,
        )
        printed = confined_run(order, graph_paths, run, how=self.sandbox)
        return records.from_json(Played, json.loads(printed))


@dataclass(frozen=True, kw_only=True)
class AnalyseOrder:
    """The order to replay a plan's recorded episodes, and to try its goal without its needs."""

    graph_path: Path
    skill: str
    facts: Mapping[str, tuple[str, ...]]
    gains: Mapping[str, tuple[str, ...]]
    needs: Mapping[str, int]
    episodes: int
    seed: int

    def work(self) -> int:
        """Play in this process, and print `Played` as JSON."""
        from flowrl.analysis.replaying import Replay
        from flowrl.evaluation import load_experts, open_walk
        from flowrl.networks.grouped import pack

        graph_paths = GraphPaths(self.graph_path)
        store = ExpertStore(graph_paths)
        run, config, env = open_walk(store.archive_of(self.skill))
        packed = pack(load_experts(store, run))
        episodes = read_episodes(graph_paths, run)
        replay = Replay(env, packed, episodes, activation=config.activation, facts=self.facts)
        steps = tuple(replay.steps(self.gains))
        tried = []
        asked = experiments_of(self.needs, self.gains[self.skill], steps) if self.episodes else {}
        for need, most in asked.items():
            places = [n for n, s in enumerate(run.plan[:-1]) if need in self.gains[s.skill]]
            asks = {"provider": max(places, default=None), "seed": self.seed}
            tried.append(replay.without(need, most, episodes=self.episodes, **asks))
        experiments = tuple(each for each in tried if each is not None)
        sys.stdout.write(json.dumps(records.to_json(Played(steps=steps, experiments=experiments))))
        return 0


def _steps(run: TrainingRun) -> Iterator[str]:
    """The skills of a run's plan."""
    return (step.skill for step in run.plan)


def _facts(graph: SkillGraph, env_name: str) -> dict[str, tuple[str, ...]]:
    """The facts that hold where the code of a skill says that it is done, by the code's digest."""
    items = find_game(env_name).items
    facts: dict[str, tuple[str, ...]] = {}
    for skill in graph.skills.values():
        names = [name for name in _names(skill.gain) if name not in items]
        digest = SkillCode.of(skill, env_name).digest
        facts[digest] = (*facts.get(digest, ()), *names)
    return facts


def _names(gain: Mapping[str, object]) -> tuple[str, ...]:
    """Names of what is gained; a floor's has its number, so that it is a fact."""
    return tuple(f"{name} {amount}" if name == ON_FLOOR else name for name, amount in gain.items())


def _analysis(
    skill: Skill,
    played: Mapping[str, Played],
    config: BottomUpConfig,
    texts: Mapping[str, Skill],
) -> SkillAnalysis:
    steps = [step for each in played.values() for step in each.steps if step.skill == skill.name]
    done = [step for step in steps if step.done]
    experiments, items = played[skill.name].experiments, find_game(config.ppo.env_name).items
    found = disproofs(skill, steps, experiments, items=items)

    def mean(amounts: Callable[[PlayedStep], Mapping[str, int]]) -> dict[str, float]:
        """The mean of each amount, over the successes."""
        total = sum((Counter(amounts(step)) for step in done), Counter[str]())
        return {name: round(total[name] / len(done), 3) for name in sorted(total)}

    return SkillAnalysis(
        skill=skill.name,
        attempts=len(steps),
        successes=len(done),
        timesteps=statistics.median([step.timesteps for step in done] or [0]),
        least=_least([step.start for step in done]),
        end=mean(lambda step: step.end),
        spent=mean(lambda step: step.spent),
        won=mean(lambda step: step.won),
        experiments=experiments,
        disproofs=found,
        diff=_diff(skill, replace(skill, **corrected(skill, found)), texts),
    )


def _least(starts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """The least of each amount; what is missing once is left out."""
    names = set(starts[0]).intersection(*starts) if starts else ()
    return {name: min(start[name] for start in starts) for name in sorted(names)}


def _lines(found: SkillAnalysis) -> Iterator[str]:
    took = f", after {found.timesteps:g} timesteps (median)" if found.successes else ""
    yield f"{found.skill}: {found.successes} of {found.attempts} attempts succeed{took}"
    for name in sorted({*found.least, *found.spent, *found.won}):
        lost, won = found.spent.get(name, 0), found.won.get(name, 0)
        if max(lost, won, found.least.get(name, 0)) >= _TOLD:
            said = f"{lost:g} spent and {won:g} won on average"
            yield f"  {name}: at least {found.least.get(name, 0)} at the start, {said}"
    for each in found.experiments:
        yield f"  {each.line}"
    for each in found.disproofs:
        now = "no line a*n + b fits" if each.now is None else each.now
        yield f"  {each.key} of {each.item}: {each.was} is disproved, {now}: {each.evidence}"
    yield from found.diff.splitlines()


def _texts(config: BottomUpConfig) -> dict[str, Skill]:
    """The skills that files say now; a folder that is gone says none."""
    folder = config.graph.skills_dir
    given = folder if folder is not None and folder.is_dir() else None
    return load_library(config.ppo.env_name, given, trust=config.graph.trust_skills)


def _diff(skill: Skill, changed: Skill, texts: Mapping[str, Skill]) -> str:
    """A unified diff of the skill's file; of its text in the graph, where no file says the same."""
    if changed == skill:
        return ""
    written, after = texts.get(skill.name), None
    if written is not None and written == skill and written.origin is not None:
        place = written.origin.place
        text = storage.read_bytes(Path(place)).decode("utf-8-sig")
        after = _with_contract(text, skill, changed)
    if after is None:
        place = f"{skill.name}.py"
        told = {key: value for key, value in skill.to_json().items() if key != "trusted"}
        code = [told.pop(key) for key in ("is_done", "reward")]
        head = [f"{key} = {json.dumps(value)}" for key, value in told.items()]
        text = "\n".join([*head, *(f"\n\n{each}" for each in code)]) + "\n"
        after = _with_contract(text, skill, changed) or text
    both = (each.splitlines(keepends=True) for each in (text, after))
    return "".join(difflib.unified_diff(*both, fromfile=place, tofile=place))


def _with_contract(text: str, skill: Skill, changed: Skill) -> str | None:
    """A skill file's text with the amounts of the changed skill.

    None if a statement that counts shares its lines, or assigns several names.
    """
    lines, places = text.splitlines(keepends=True), _own_lines(text)
    if not {"name", *(key for key in AMOUNTS if getattr(skill, key))} <= places.keys():
        return None
    after = places["name"].end_lineno or 0
    keys = [key for key in AMOUNTS if getattr(skill, key) != getattr(changed, key)]
    spans = {key: (after, after) for key in keys}
    spans |= {k: (places[k].lineno - 1, places[k].end_lineno) for k in keys if k in places}
    for key in sorted(keys, key=spans.__getitem__, reverse=True):
        amounts = {item: str(amount) for item, amount in getattr(changed, key).items()}
        lines[slice(*spans[key])] = [f"{key} = {json.dumps(amounts)}\n"]
    return "".join(lines)


def _own_lines(text: str) -> dict[str, ast.Assign]:
    """The statements that assign one name each, and have their lines for themselves."""
    body = without_annotations(ast.parse(text)).body
    spans = {node: range(node.lineno, (node.end_lineno or node.lineno) + 1) for node in body}
    taken = Counter(line for span in spans.values() for line in span)
    return {
        node.targets[0].id: node
        for node, span in spans.items()
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and len(node.targets) == 1
        and all(taken[line] == 1 for line in span)
    }


def _applied(
    graph_paths: GraphPaths,
    graph: SkillGraph,
    analyses: Sequence[SkillAnalysis],
    trained: Collection[str],
) -> list[str]:
    """Keep corrected skills with their graph, tell a scheduler that runs, and return lines.

    GraphError, and nothing is kept, if one needs a skill that is not trained.
    """
    changed = []
    for each in analyses:
        skill = graph.skills[each.skill]
        skill = replace(skill, **corrected(skill, each.disproofs))
        if skill != graph.skills[each.skill]:
            graph = graph.replacing(skill, trained=graph.skills)
            changed.append((skill, each))
            for need in (name for name in graph.all_needs(skill.name) if name not in trained):
                first = graph_paths.command("train", "--target_skill", need)
                what = f"{skill.name} now needs {need}, which is not trained"
                raise GraphError(f"{what}; train that first: {first}")
    for skill, found in changed:
        evidence = [f"{each.key} of {each.item}: {each.evidence}" for each in found.disproofs]
        SkillSources(graph_paths).correct(skill, evidence)
        if daemon_of(graph_paths.daemon_lock) is not None:
            send_request(graph_paths, Verb.ADD, skill.name)
    return [f"{skill.name}: its contract is corrected; its expert stays" for skill, _ in changed]
