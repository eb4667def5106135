"""What is checked before skills enter the book: names, needs, circles, expert numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from graphlib import CycleError as Circle
from graphlib import TopologicalSorter
from typing import Any

from flowrl.errors import CycleError, GraphError, NameRefusedError, SkillError, UnknownNeedError
from flowrl.parallel.signals import NewSkill
from flowrl.parallel.status import Entry
from flowrl.paths import display_name, slug
from flowrl.skills.skill import Skill, skill_from_data


def told_skill(name: str, data: Skill | Mapping[str, Any] | None) -> Skill | None:
    """The skill that somebody who adds it describes; None when nothing is said.

    Raises:
      SkillError: the data is malformed, or of another skill.
    """
    if isinstance(data, Mapping):
        return skill_from_data(name, data) if data else None
    if data is None:
        return None
    if not isinstance(data, Skill):
        raise SkillError(f"skill {name!r}: {type(data).__name__} is not skill data; give a mapping")
    if data.name != name:
        raise SkillError(f"skill {name!r}: the data is that of {data.name!r}; add it by its name")
    return data


def checked(
    skills: Sequence[NewSkill], known: Mapping[str, Entry], names: Mapping[str, str]
) -> tuple[dict[str, NewSkill], tuple[str, ...]]:
    """The skills by name, and their names with needs first.

    Args:
      known: the entries that are in the book already; names: slug → skill of those.

    Raises:
      NameRefusedError: a name cannot be used, or two share a slug.
      GraphError: a skill is there already, needs what nobody knows, or needs itself.
    """
    fresh: dict[str, NewSkill] = {}
    for item in skills:
        if item.skill in known or item.skill in fresh:
            raise GraphError(f"the skill {item.skill!r} is there already; add it once")
        fresh[item.skill] = item
    _check_names(fresh, dict(names))
    _check_experts(fresh, known)
    _check_needs(fresh, known)
    return fresh, _topological(fresh, known)


def _check_names(fresh: Mapping[str, NewSkill], names: dict[str, str]) -> None:
    for name in fresh:
        if name != display_name(name):
            raise NameRefusedError(f"the skill name {name!r} should be {display_name(name)!r}")
        other = names.setdefault(slug(name), name)
        if other != name:
            raise NameRefusedError(
                f"the skills {other!r} and {name!r} would share the folder name {slug(name)}; "
                "rename one of them"
            )


def _check_experts(fresh: Mapping[str, NewSkill], known: Mapping[str, Entry]) -> None:
    wanted = {name: item.expert for name, item in fresh.items() if item.expert is not None}
    if not wanted:
        return
    taken = {entry.expert: entry.skill for entry in known.values()}
    for name, expert in wanted.items():
        owner = taken.setdefault(expert, name)
        if owner != name:
            raise GraphError(f"{name!r} cannot be expert {expert}, which {owner!r} is already")


def _check_needs(fresh: Mapping[str, NewSkill], known: Mapping[str, Entry]) -> None:
    for name, item in fresh.items():
        for need in item.needs:
            if need not in known and need not in fresh:
                raise UnknownNeedError(f"{name!r} needs {need!r}, which is not there; add it first")
        if len(set(item.needs)) != len(item.needs):
            raise GraphError(f"{name!r} names a need twice: {', '.join(item.needs)}")


def _topological(fresh: Mapping[str, NewSkill], known: Mapping[str, Entry]) -> tuple[str, ...]:
    graph = {
        name: [need for need in item.needs if need not in known] for name, item in fresh.items()
    }
    try:
        return tuple(TopologicalSorter(graph).static_order())
    except Circle as error:
        circle = " → ".join(error.args[1])
        raise CycleError(f"these skills need one another in a circle: {circle}") from error
