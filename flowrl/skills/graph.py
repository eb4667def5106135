"""The graph of skills: which skill needs which, and plans.

Edges are derived: a skill depends on the skills whose gains it requires. Where several
skills yield enough of an item, the provider is chosen the same way every time: the one that the
skill names in `provided_by`; else skills of the user's own, then embedded ones (before an embedded
one whose gain grows with its count, only own ones whose gain does); of these those that can be
learned earliest, among them one whose gain grows, among them the first.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from flowrl.errors import GraphError, closest
from flowrl.paths import printable, slug
from flowrl.skills.floors import Floors
from flowrl.skills.learnable import all_providers, in_order, learnable, why_impossible
from flowrl.skills.levels import CAPACITY, able, direct_needs, ephemeral_items, kept_needs
from flowrl.skills.planner import Planner
from flowrl.skills.skill import ON_FLOOR, Skill, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The provider of an item that another skill needs, the reason, and the other candidates."""

    skill: str
    item: str
    provider: str
    why: str
    others: tuple[str, ...]


class SkillGraph:
    """An immutable set of skills with their dependencies; the order of the skills breaks ties.

    GraphError is raised for two skills whose names share a slug, and by each method for a skill
    that is unknown or can never be learned.
    """

    def __init__(self, skills: Iterable[Skill] = (), *, capacity: int = CAPACITY) -> None:
        if capacity < 1:
            raise GraphError(f"capacity is {capacity}: no item can be held; give 1 or more")
        self.capacity = capacity
        self.skills: Mapping[str, Skill] = MappingProxyType(_by_name(skills))
        self._learned = learnable(self.skills, capacity=capacity)

    def check(self) -> None:
        """Raise GraphError if some skill can never be learned.

        So is one of the user's own that is like a skill that is learned later, or none; an embedded
        one then begins from nothing.
        """
        for name in self.skills:
            self._require_possible(name)
        for skill in self.skills.values():
            if not skill.embedded:
                self.check_like(skill)

    def check_like(self, skill: Skill) -> None:
        """Raise GraphError if a skill of the graph is like one that is learned later, or none."""
        place = self._place
        if skill.like is None or place.get(skill.like, len(place)) < place[skill.name]:
            return
        near = closest(skill.like, self.skills)
        what = "is learned later" if skill.like in place else f"is no skill here{near}"
        raise GraphError(
            f"{skill.name!r} is like {printable(skill.like)!r}, which {what}; name a skill "
            "that is learned before it, or leave `like` out"
        )

    def plus(self, skills: Iterable[Skill]) -> SkillGraph:
        """Return a graph with more skills, in which all others have the needs that they have here.

        Raises GraphError if a name is taken, a skill can never be learned or has no plan, or it
        would provide what another skill has from elsewhere.
        """
        new = list(skills)
        for place, skill in enumerate(new):
            if skill.name in {other.name for other in new[:place]}:
                raise GraphError(f"two of the new skills are {skill.name!r}; rename one")
            if skill.name in self.skills:
                raise GraphError(f"the graph has {skill.name!r} already; give it another name")
        return self._with(new, "rename what the new skill gains")

    def replacing(self, skill: Skill, *, trained: Collection[str] = ()) -> SkillGraph:
        """Return a graph with another text of one skill, in which all others have the same needs.

        It may itself need other skills that are `trained`. Raises GraphError as `plus`, or if a
        skill would need others than here.
        """
        return self._with([skill], "give the changed skill another name", trained)

    def _with(self, new: Sequence[Skill], remedy: str, trained: Collection[str] = ()) -> SkillGraph:
        skills = {**self.skills, **{skill.name: skill for skill in new}}
        other = SkillGraph(skills.values(), capacity=self.capacity)
        other.check()
        for skill in new:
            other.plan(skill.name)
        changed = {skill.name for skill in new if {*other.all_needs(skill.name)} <= {*trained}}
        for name in (name for name in self.skills if name not in changed):
            if (now := set(other.needs(name))) != set(self.needs(name)):
                was, will = (", ".join(sorted(x)) or "nothing" for x in (self.needs(name), now))
                raise GraphError(f"{name} would need {will} instead of {was}; {remedy}")
        return other

    def needs(self, name: str) -> tuple[str, ...]:
        """The direct providers of a skill's needs, in the order in which it names them."""
        self._require_possible(name)
        return tuple(dict.fromkeys(self._learned.chosen[name].values()))

    def choices(self, name: str) -> tuple[Choice, ...]:
        """The provider of each item that a skill needs, in the order in which it names them."""
        self._require_possible(name)
        chosen = self._learned.chosen[name].items()
        return tuple(self._choice(self.skills[name], item, provider) for item, provider in chosen)

    def all_needs(self, name: str) -> tuple[str, ...]:
        """All skills that must be learned before this one, each after its own needs."""
        self._require_possible(name)
        needed = all_providers(name, self._learned.chosen)
        return tuple(skill for skill in self._order if skill in needed)

    def order(self) -> tuple[str, ...]:
        """Every skill that can be learned, each after its needs, else as in the library."""
        return self._order

    def plan(self, name: str, count: int = 1) -> tuple[Step, ...]:
        """The steps that lead from an empty inventory to this skill at this count.

        The last step is the skill itself, the others are among `all_needs(name)`. Counts are
        levels: see `flowrl.skills.levels`. The same graph always gives the same plan.
        Raises GraphError also where a step exceeds the capacity.
        """
        self._require_possible(name)
        if count < 1:
            raise GraphError(f"{name!r} × {count} is no goal; ask for a count of at least 1")
        planner = Planner(
            skills=self.skills,
            learned=self._learned,
            needed=all_providers(name, self._learned.chosen),
            ephemeral=ephemeral_items(self.skills.values()),
            floors=Floors(self.skills.values()),
            capacity=self.capacity,
        )
        return planner.plan(Step(skill=name, count=count))

    def kept(self, steps: Sequence[Step]) -> list[dict[str, int]]:
        """The items that each step of a plan leaves for later ones: see `flowrl.skills.levels`."""
        return kept_needs(steps, self.skills, ephemeral=ephemeral_items(self.skills.values()))

    @cached_property
    def _order(self) -> tuple[str, ...]:
        return in_order(self._learned.chosen, by=self.skills)

    @cached_property
    def _place(self) -> Mapping[str, int]:
        return {name: number for number, name in enumerate(self._order)}

    def _choice(self, skill: Skill, item: str, provider: str) -> Choice:
        if item not in self._learned.gainers:
            why = "it leads there"
            return Choice(skill=skill.name, item=ON_FLOOR, provider=provider, why=why, others=())
        others = tuple(
            name
            for name in able(
                (self.skills[name] for name in self._learned.gainers[item]),
                item,
                direct_needs(skill)[item],
                capacity=self.capacity,
            )
            if name not in (provider, skill.name)
        )
        if item in skill.provided_by:
            why = "named in provided_by"
        elif not others:
            why = "no other skill yields it"
        elif not self.skills[provider].embedded and any(self.skills[o].embedded for o in others):
            why = "your own skill goes before the library's"
        else:
            why = "can be learned first"
        return Choice(skill=skill.name, item=item, provider=provider, why=why, others=others)

    def _require_possible(self, name: str) -> None:
        if name not in self.skills:
            near = closest(name, self.skills) or f"; there are {', '.join(self.skills) or 'none'}"
            raise GraphError(f"no skill {name!r}{near}")
        if name not in self._learned.rank:
            raise why_impossible(name, self.skills, self._learned, capacity=self.capacity)


def _by_name(skills: Iterable[Skill]) -> dict[str, Skill]:
    named: dict[str, Skill] = {}
    slugs: dict[str, str] = {}
    for skill in skills:
        if not isinstance(skill, Skill):
            raise TypeError(f"{skill!r} is no Skill; of load_library(…) give the .values()")
        key = re.sub("_+", "_", slug(skill.name))  # people do not see how many blanks there are
        other = slugs.get(key)
        if other is not None:
            where = f"{skill.origin.place}: " if skill.origin else ""
            what = f"{where}the skills {other!r} and {skill.name!r} share the slug {key!r}"
            raise GraphError(f"{what}; rename one")
        named[skill.name], slugs[key] = skill, skill.name
    return named
