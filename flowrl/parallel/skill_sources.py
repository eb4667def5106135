"""The kept sources of a graph's skills; one is fixed once an expert is trained on it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from flowrl import storage
from flowrl.errors import FileRefusedError, SkillError
from flowrl.experts.store import ExpertStore
from flowrl.parallel.run_folder import live_runs
from flowrl.paths import GraphPaths
from flowrl.runs import read_run
from flowrl.skills.skill import Skill
from flowrl.storage import records

logger = logging.getLogger(__name__)


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
        live = (read_run(place) for place in live_runs(self._paths))
        return {version.skill for version in merged} | {run.skill for run in live}


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
