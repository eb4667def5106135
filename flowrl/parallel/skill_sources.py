"""What a graph is: its game and network sizes, and the sources of its skills.

A skill's source is fixed once an expert is trained on it.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flowrl import arguments, storage
from flowrl import config as configs
from flowrl.config import BottomUpConfig, PPOConfig, SkillConfig
from flowrl.errors import ConfigError, FileRefusedError, SkillError, closest
from flowrl.experts.store import ExpertStore
from flowrl.games.base import find_game
from flowrl.parallel.run_folder import readable_runs
from flowrl.paths import GraphPaths
from flowrl.skills.graph import SkillGraph
from flowrl.skills.skill import Skill, load_library
from flowrl.storage import records
from flowrl.storage.records import Positive

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphRecord:
    """graph.json: what all experts of a graph have in common; written once, at its birth."""

    env_name: str
    layer_size: Positive
    activation: str


def check_graph_record(layout: GraphPaths, config: PPOConfig) -> None:
    """Make sure that the graph's experts can be trained with this configuration.

    Raises:
      ConfigError: the graph is for another game or has networks of other sizes.
      FileRefusedError: graph.json is damaged.
    """
    if not layout.graph_json.exists():
        return
    found = records.read(layout.graph_json, GraphRecord)
    for field in dataclasses.fields(GraphRecord):
        was, now = getattr(found, field.name), getattr(config, field.name)
        if was != now:
            raise ConfigError(
                f"--{field.name} is {now}, and the graph in {layout.root} was begun with {was}; "
                f"use --{field.name} {was}, or another --graph_path"
            )


def record_graph(layout: GraphPaths, config: PPOConfig) -> None:
    """Write graph.json if there is none."""
    if not layout.graph_json.exists():
        facts = {item.name: getattr(config, item.name) for item in dataclasses.fields(GraphRecord)}
        records.write(layout.graph_json, GraphRecord(**facts))


def skill_configs(config: BottomUpConfig, skills: Mapping[str, Skill]) -> Mapping[str, SkillConfig]:
    """How each skill is trained, from the flags, `--skill_config` and its own file.

    Raises:
      ConfigError: a setting cannot be used; names the skill and the place.
    """
    path, tables = config.graph.skill_config, {}
    if path is not None:
        tables = arguments.toml(path, flag="skill_config")
    for name in tables.keys() - skills.keys():
        raise ConfigError(f"{path}: there is no skill {name!r}{closest(name, skills)}")
    found: dict[str, SkillConfig] = {}
    for name, skill in skills.items():
        try:
            of_toml = configs.skill_settings(tables.get(name, {}))
            found[name] = configs.for_skill(config, of_file=skill.training, of_toml=of_toml)
        except ConfigError as error:
            raise ConfigError(f"the training of {name!r}: {error}") from error
    return found


class SkillSources:
    """One file per skill below `skill_files/`.

    While a skill has neither a merged expert nor a live run its file may still be replaced.
    """

    def __init__(self, paths: GraphPaths) -> None:
        self._paths = paths

    def record(self, skill: Skill) -> None:
        """Keep the skill's source, unless one is kept that an expert was trained on."""
        path = self._paths.skill_file(skill.name)
        if not path.exists() or skill.name not in self._fixed():
            storage.make_dir(path.parent)
            records.write(path, skill.to_json())

    def recorded(self) -> dict[str, Skill]:
        """Return every kept skill by name.

        Raises:
          FileRefusedError: a file is damaged; says which.
        """
        skills: dict[str, Skill] = {}
        for path in sorted(self._paths.skill_files.glob("*.json")):
            skill = read_skill_file(path)
            skills[skill.name] = skill
        return skills

    def over(self, library: Mapping[str, Skill]) -> dict[str, Skill]:
        """Return the library, with the kept skills where they are fixed or the library has none."""
        fixed = self._fixed()
        recorded = self.recorded().items()
        kept = {name: skill for name, skill in recorded if name in fixed or name not in library}
        kept = {name: _like(library.get(name), skill) for name, skill in kept.items()}
        for name, skill in kept.items():
            if name in library and library[name] != skill:
                logger.warning(
                    "%s has changed since this graph began to train it: the graph keeps %s",
                    name,
                    self._paths.skill_file(name),
                )
        return {**library, **kept}

    def _fixed(self) -> set[str]:
        """The skills with a merged expert or a live run."""
        merged = ExpertStore(self._paths).manifest().experts.values()
        live = {run.skill for _, run in readable_runs(self._paths)}
        return {version.skill for version in merged} | live


def _like(now: Skill | None, kept: Skill) -> Skill:
    """The kept skill, with the present settings of its training, which may change."""
    if now is None:
        return kept
    return dataclasses.replace(kept, embedded=now.embedded, training=now.training)


def open_graph(config: BottomUpConfig, sources: SkillSources) -> SkillGraph:
    """Return the graph of the library and of `--skills_dir`; of skills in training as kept."""
    game, own = config.ppo.env_name, config.graph
    library = load_library(game, own.skills_dir, trust=own.trust_skills)
    skills = sources.over(library).values()
    graph = SkillGraph(skills, capacity=find_game(game).capacity)
    graph.check()
    return graph


def read_skill_file(path: Path) -> Skill:
    """Return the skill in a kept file.

    Raises:
      FileRefusedError: it is damaged.
    """
    data = records.read_document(path)
    try:
        return Skill.from_json(data)
    except SkillError as error:
        raise FileRefusedError(f"{path} is damaged: {error}; restore it") from error
