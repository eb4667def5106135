"""A graph's identity: its game and network sizes, and the sources of its skills.

A skill's source is fixed once an expert is trained on it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

from flowrl import arguments, command_line, notices, storage
from flowrl.config import ENGINES, BottomUpConfig, LaunchConfig, PPOConfig, flags, with_flags
from flowrl.errors import ConfigError, FileRefusedError, KeptSkillError, SkillError, closest
from flowrl.experts.store import ExpertStore
from flowrl.games.base import check_coverage, find_game
from flowrl.launchers.sandbox import confinement
from flowrl.launchers.slurm import checked_options
from flowrl.parallel.training_setup import live_runs, readable_runs
from flowrl.paths import GraphPaths, slug
from flowrl.runs import read_run
from flowrl.skills.graph import SkillGraph
from flowrl.skills.skill import Skill, load_library, skill_settings
from flowrl.skills.validation.cache import ApprovalStore
from flowrl.skills.validation.dry_run import approve_skills
from flowrl.storage import records
from flowrl.storage.records import Positive, Word

logger = logging.getLogger(__name__)


_NOTICE = "library"
_TABLE = "--skill_config"
_FORMER = "former"  # the folder of texts that were corrected
_OF_ENGINE = ("cpus_per_run", "slurm_args")  # keys of such a table, beside a skill's settings
GIVEN = (*get_args(arguments.Origin), _TABLE)  # origins of settings that a user gave a start
_COMMON = ("env_name", "layer_size", "activation", "sight", "egocentric")


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphRecord:
    """graph.json: what all experts of a graph have in common; written once, at its birth."""

    env_name: str
    layer_size: Positive
    activation: str
    sight: bool = False
    egocentric: bool = False
    library: Mapping[str, Word] = field(default_factory=dict)  # embedded skill → its digest


def check_graph_record(graph_paths: GraphPaths, config: PPOConfig) -> None:
    """Make sure that the graph's experts can be trained with this configuration.

    Without graph.json, the record of a run says what the graph is. ConfigError means that the graph
    is for another game or has networks of other sizes, FileRefusedError that graph.json is damaged.
    """
    recorded = graph_paths.graph_json.exists()
    record = read_graph_record(graph_paths) if recorded else record_of_runs(graph_paths)
    common = _COMMON if record else ()
    if find_game(config.env_name).moves is None:  # which no frame changes
        common = tuple(name for name in common if name != "egocentric")
    was, now = ({name: getattr(each, name) for name in common} for each in (record, config))
    for said in arguments.other_flags(was, now):
        raise ConfigError(
            f"the graph in {graph_paths.root} was begun with {said} "
            f"({'graph.json' if recorded else 'its runs'}); give that, or another --graph_path"
        )


def read_graph_record(graph_paths: GraphPaths) -> GraphRecord:
    """Read graph.json; FileRefusedError says what to do if it is missing or damaged."""
    repair = graph_paths.command("fsck", "--repair")
    remedy = f"restore it from a copy, or run {repair}, which sets it aside: the next start makes "
    remedy += "it anew of the runs' records"
    return records.read(graph_paths.graph_json, GraphRecord, remedy=remedy)


def record_of_runs(graph_paths: GraphPaths) -> GraphRecord | None:
    """Return the record of a merged or live run, whichever can be read first."""
    merged = ExpertStore(graph_paths).manifest().experts.values()
    archives = (graph_paths.archive(version.index, version.skill) for version in merged)
    for run_paths in (*archives, *live_runs(graph_paths)):
        with suppress(FileRefusedError, records.MalformedError):
            config = read_run(run_paths).config
            known = {name: config[name] for name in _COMMON if name in config}
            return records.from_json(GraphRecord, known)
    return None


def record_graph(graph_paths: GraphPaths, config: PPOConfig | GraphRecord) -> None:
    """Write graph.json if there is none; publish a notice of library skills that changed since."""
    now = _library(config.env_name)
    if not graph_paths.graph_json.exists():
        common = {name: getattr(config, name) for name in _COMMON}
        records.write(graph_paths.graph_json, GraphRecord(**common, library=now))
    was = read_graph_record(graph_paths).library
    changed = [name for name, digest in was.items() if now.get(name) != digest]
    if not changed:
        notices.withdraw(graph_paths, _NOTICE)
        return
    notices.publish(
        graph_paths,
        _NOTICE,
        f"the library has other versions of {', '.join(changed)} than when this graph was begun: "
        "trained skills stay as they were (skill_files/), others are trained as they are now; to "
        "train all anew, choose another graph",
    )


def _library(env_name: str) -> dict[str, str]:
    """The digest of the contract and code of each embedded skill."""
    return {name: _digest(skill) for name, skill in load_library(env_name).items()}


def _digest(skill: Skill) -> str:
    facts = dataclasses.replace(skill, description="", like=None, training={}).to_json()
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class SkillConfig:
    """The settings that train a skill, and the origin of each value that is no default."""

    ppo: PPOConfig
    origins: Mapping[str, str]  # flag → "command line", "skill file" and so on
    launch: LaunchConfig


def for_skill(
    config: BottomUpConfig,
    *,
    of_file: Mapping[str, Any],
    of_toml: Mapping[str, Any],
    of_sweep: Mapping[str, Any] = MappingProxyType({}),
    of_engine: Mapping[str, Any] = MappingProxyType({}),
) -> SkillConfig:
    """Return how a skill is trained, or raise ConfigError if the values make no sense together.

    The command line and the environment come before `--skill_config`, `--config` before what a
    sweep has found, and that before the skill's file.
    """
    known = flags(config.ppo)
    given = {name: origin for name, origin in config.origins.items() if name in known}
    said = [name for name, origin in given.items() if origin != "config file"]
    written = {**of_file, **of_sweep}
    values = {name: value for name, value in written.items() if name not in given}
    origins = {**given, **dict.fromkeys(values, "skill file")}
    origins |= dict.fromkeys(of_sweep.keys() & values.keys(), "sweep")
    stronger = {name: value for name, value in of_toml.items() if name not in said}
    origins |= dict.fromkeys(stronger, _TABLE)
    ppo = with_flags(config.ppo, **{**values, **stronger})
    if config.schedule.devices_per_run > 1:  # a run trains on all GPUs that it gets
        ppo = dataclasses.replace(ppo, num_devices=config.schedule.devices_per_run)
    ppo.check()
    check_coverage(ppo, origins)
    return SkillConfig(ppo=ppo, origins=origins, launch=_launch(config, of_engine))


def _launch(config: BottomUpConfig, table: Mapping[str, Any]) -> LaunchConfig:
    """Return what an engine is asked for by a skill's runs; other launchers ask for nothing."""
    words, cpus = table.get("slurm_args", []), table.get("cpus_per_run")
    if not (isinstance(words, list) and all(isinstance(word, str) for word in words)):
        raise ConfigError('slurm_args is no list of words; write ["partition=gpu"]')
    checked_options(words)
    launch = config.launch
    given = config.origins.get("cpus_per_run", "config file") != "config file"
    if cpus is not None:
        cpus = arguments.value_of(LaunchConfig, "cpus_per_run", [str(cpus)], _TABLE)
    if launch.launcher not in ENGINES:
        return launch  # so that the same file is of use on a laptop
    return dataclasses.replace(
        launch,
        cpus_per_run=launch.cpus_per_run if given or cpus is None else cpus,
        slurm_args=(*launch.slurm_args, *words),  # of two words sbatch takes the last
    )


def skill_configs(config: BottomUpConfig, skills: Mapping[str, Skill]) -> Mapping[str, SkillConfig]:
    """Return each skill's settings from all sources; ConfigError names the skill and the place."""
    graph_paths = GraphPaths(config.graph.graph_path)
    path, tables = config.graph.skill_config, {}
    if path is not None:
        tables = command_line.toml(path, flag="skill_config")
    for other, table in tables.items():
        if not isinstance(table, dict):
            below = f'write it below the name of a skill, as ["{next(iter(skills))}"]'
            raise ConfigError(f"{path}: {other!r} stands outside of a table; {below}")
        if other not in skills:
            near = closest(other, skills) or "; flowrl skills GRAPH lists them"
            raise ConfigError(f"{path}: there is no skill {other!r}{near}")
    settings: dict[str, SkillConfig] = {}
    for name, skill in skills.items():
        try:
            table = dict(tables.get(name, {}))
            of_engine = {key: table.pop(key) for key in _OF_ENGINE if key in table}
            of_toml = skill_settings(table)
            tuned = skill_settings(read_tuned(graph_paths, name))
            settings[name] = for_skill(
                config,
                of_file=skill.training,
                of_toml=of_toml,
                of_sweep=tuned,
                of_engine=of_engine,
            )
        except ConfigError as error:
            place = f" ({path})" if name in tables else ""
            raise ConfigError(f"the training of {name!r}{place}: {error}") from error
    return settings


def read_tuned(graph_paths: GraphPaths, skill: str) -> dict[str, Any]:
    """Return the settings that a sweep has found for a skill, {} without any; or ConfigError."""
    path = graph_paths.tuned_file(skill)
    if not path.exists():
        return {}
    table = command_line.toml(path)
    if list(table) != [skill] or not isinstance(table[skill], dict):
        raise ConfigError(f"{path} has no single table {skill!r}; run flowrl sweep forget")
    return table[skill]


class SkillSources:
    """The files below `skill_files/`, replaceable until a skill has an expert or a live run."""

    def __init__(self, graph_paths: GraphPaths) -> None:
        self._graph_paths = graph_paths
        self.added: frozenset[str] = frozenset()  # kept skills of the user's that `over` adds
        self.refused: set[Path] = set()  # kept files whose code this version does not admit

    def record(self, skill: Skill) -> None:
        """Keep the skill's source, unless one is kept that an expert was trained on."""
        path = self._graph_paths.skill_file(skill.name)
        if not path.exists() or path in self.refused or skill.name not in self._fixed():
            self.keep_anew(skill)

    def keep_anew(self, skill: Skill) -> None:
        """Keep this source of the skill, also in place of one that an expert was trained on."""
        path = self._graph_paths.skill_file(skill.name)
        storage.make_dir(path.parent)
        records.write(path, skill.to_json())
        self.refused.discard(path)

    def correct(self, skill: Skill, evidence: Sequence[str]) -> None:
        """Keep another text of a skill, and the former one with the evidence against it."""
        path = self._graph_paths.skill_file(skill.name)
        former = path.parent / _FORMER
        storage.make_dir(former)
        number = len([*former.glob(f"{path.stem}.*.json")]) + 1
        told = {**records.read_document(path), "evidence": list(evidence)}
        records.write(former / f"{path.stem}.{number}.json", told)
        self.keep_anew(skill)

    def recorded(self) -> dict[str, Skill]:
        """Return every kept skill that this version admits; FileRefusedError if one is damaged."""
        skills: dict[str, Skill] = {}
        for path in sorted(self._graph_paths.skill_files.glob("*.json")):
            try:
                skill = read_skill_file(path)
            except KeptSkillError as error:
                self.refused.add(path)
                logger.warning("%s", error)
            else:
                skills[skill.name] = skill
        return skills

    def over(self, library: Mapping[str, Skill], *, tell: bool = True) -> dict[str, Skill]:
        """Return the library, with the kept skills where they are fixed or the library has none.

        A warning tells of each kept skill that the library has otherwise, unless `tell` is False
        or the kept text has taken the place of the library's.
        """
        fixed = self._fixed()
        recorded = self.recorded().items()
        kept = {name: skill for name, skill in recorded if name in fixed or name not in library}
        born = self._born_with() if kept.keys() - library.keys() else {}
        kept = {name: _present(skill, library.get(name), born) for name, skill in kept.items()}
        new = (name for name, skill in kept.items() if name not in library and not skill.embedded)
        self.added = frozenset(new)
        for name, skill in kept.items() if tell else ():
            if library.get(name, skill) not in (skill, *self._former(skill)):
                logger.warning(
                    "%s has changed since this graph began to train it: the graph keeps %s; "
                    "%s trains it anew under the new text, another --graph_path all skills",
                    name,
                    self._graph_paths.skill_file(name),
                    self._graph_paths.command("retrain", name, *_folder_of(library[name])),
                )
        return {**library, **kept}

    def _former(self, skill: Skill) -> Iterator[Skill]:
        """The former texts of a kept skill, with the present settings."""
        path = self._graph_paths.skill_file(skill.name)
        for former in (path.parent / _FORMER).glob(f"{path.stem}.*.json"):
            told = records.read_document(former)
            told.pop("evidence", None)
            with suppress(SkillError):  # this version does not admit its code
                yield _present(Skill.from_json(told), skill, {})

    def _born_with(self) -> Mapping[str, str]:
        """The library's skills when the graph was begun, with their digests."""
        path = self._graph_paths.graph_json
        return records.read(path, GraphRecord).library if path.exists() else {}

    def _fixed(self) -> set[str]:
        """The skills with a merged expert or a live run."""
        live = {run.skill for _, run in readable_runs(self._graph_paths)}
        return trained_skills(self._graph_paths) | live


def _folder_of(skill: Skill) -> tuple[str, ...]:
    """Return the flag that names the folder of a user's own skill file."""
    folder = Path(skill.origin.place if skill.origin else "").parent
    return ("--skills_dir", str(folder)) if folder.is_absolute() and not skill.embedded else ()


def _present(kept: Skill, now: Skill | None, born: Mapping[str, str]) -> Skill:
    """The kept skill, with the present settings of its training, which may change.

    One that the library does not have any more is embedded if it was when the graph was begun.
    """
    if now is not None:
        return dataclasses.replace(
            kept, embedded=now.embedded, like=now.like, training=now.training
        )
    return dataclasses.replace(kept, embedded=born.get(kept.name) == _digest(kept))


def open_graph(config: BottomUpConfig, sources: SkillSources) -> SkillGraph:
    """Return the graph of the skills of the game and of `--skills_dir`; if in training, as kept."""
    game, own = config.ppo.env_name, config.graph
    embedded = load_library(game, own.skills_dir, trust=own.trust_skills)
    if not embedded:
        what = f"the game {game} comes with no skills: none is in {find_game(game).library_folder}"
        raise ConfigError(f"{what}; correct that, or name a folder by --skills_dir")
    skills = sources.over(embedded).values()
    capacity = find_game(game).capacity
    graph = SkillGraph(skills, capacity=capacity)
    if sources.refused:  # what needs them is left out, too
        graph = SkillGraph([graph.skills[name] for name in graph.order()], capacity=capacity)
    graph.check()
    return graph


def keep_new_skills(
    graph_paths: GraphPaths, config: BottomUpConfig, skills: Sequence[Skill]
) -> None:
    """Check skills and try their code, and keep them with a graph that may have them already.

    What is refused raises FlowrlError and changes nothing.
    """
    sources = SkillSources(graph_paths)
    kept = sources.recorded()
    new = [skill for skill in skills if kept.get(skill.name) != skill]
    skill_configs(config, open_graph(config, sources).plus(new).skills)
    confine = confinement(config.launch.sandbox).in_folder
    game = config.ppo.env_name
    approvals = approve_skills(graph_paths, skills, game, trust=False, confine=confine)
    for skill in skills:
        ApprovalStore(graph_paths.approvals).keep(approvals[skill.name])
        sources.record(skill)


def keep_other_text(
    graph_paths: GraphPaths, config: BottomUpConfig, skill: Skill, evidence: Sequence[str]
) -> None:
    """Check another text of a graph's skill, try its code and keep it; raises as `keep_new_skills`.

    It may need other skills than before, if these have experts. The former text stays beside it.
    """
    sources, trust = SkillSources(graph_paths), config.graph.trust_skills
    trained = trained_skills(graph_paths)
    graph = open_graph(config, sources).replacing(skill, trained=trained)
    skill_configs(config, graph.skills)
    confine = confinement(config.launch.sandbox).in_folder
    game = config.ppo.env_name
    approvals = approve_skills(graph_paths, [skill], game, trust=trust, confine=confine)
    ApprovalStore(graph_paths.approvals).keep(approvals[skill.name])
    if sources.recorded().get(skill.name, skill) == skill:
        sources.keep_anew(skill)
    else:
        sources.correct(skill, evidence)


def trained_skills(graph_paths: GraphPaths) -> set[str]:
    """The skills that have a merged expert."""
    merged = ExpertStore(graph_paths).manifest().experts.values()
    return {version.skill for version in merged}


def read_skill_file(path: Path) -> Skill:
    """Return the skill in a kept file; FileRefusedError means that it is damaged.

    KeptSkillError means that an earlier version admitted its code and this one does not.
    """
    data = records.read_document(path)
    try:
        skill = Skill.from_json(data)
    except SkillError as error:
        raise KeptSkillError(
            f"{path}: this version of flowrl refuses it: {error}; to go on with this skill, "
            "correct it in a file of its name, and use flowrl add or --skills_dir"
        ) from error
    if path.stem != slug(skill.name):
        raise FileRefusedError(f"{path} holds another skill, {skill.name!r}; {records.RESTORE}")
    return skill
