"""The source of every skill that a graph has begun to train, kept as it was then."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from flowrl import durable
from flowrl.errors import FileRefusedError, SkillError
from flowrl.layout import GraphLayout
from flowrl.skills.skill import Skill

logger = logging.getLogger(__name__)
_FILE_LIMIT_BYTES = 2**20


class SkillBook:
    """One immutable file per skill below `skill_files/`."""

    def __init__(self, layout: GraphLayout) -> None:
        self._layout = layout

    def record(self, skill: Skill) -> None:
        """Keep the skill's source, if it is not kept yet."""
        path = self._layout.skill_file(skill.name)
        if not path.exists():
            durable.make_dir(path.parent)
            durable.write_json(path, skill.to_json())

    def recorded(self) -> dict[str, Skill]:
        """Every kept skill by name.

        Raises:
          FileRefusedError: a file is damaged; says which.
        """
        skills: dict[str, Skill] = {}
        for path in sorted(self._layout.skill_files.glob("*.json")):
            facts = durable.read_json(path, limit_bytes=_FILE_LIMIT_BYTES)
            try:
                skill = Skill.from_json(facts)
            except SkillError as error:
                raise FileRefusedError(f"{path} is damaged: {error}; restore it") from error
            skills[skill.name] = skill
        return skills

    def over(self, library: Mapping[str, Skill]) -> dict[str, Skill]:
        """The library with the kept skills in place of those that have changed since."""
        kept = self.recorded()
        for name, skill in kept.items():
            if name in library and library[name] != skill:
                logger.warning(
                    "%s has changed since this graph began to train it: the graph keeps %s",
                    name,
                    self._layout.skill_file(name),
                )
        return {**library, **kept}
