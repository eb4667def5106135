"""The graph of skills: who provides what for whom, what can be learned next, and plans.

Nobody writes edges down: a skill depends on the skills whose gains it requires. Each item has one
provider, chosen the same way every time: among the skills that yield as much as any one skill asks
for, those that can be learned earliest, among them one whose gain grows with its count, among them
the first of the library.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType

import networkx as nx

from flowrl.errors import CycleError, GraphError, UnknownNeedError
from flowrl.layout import slug
from flowrl.skills.planning import Planner
from flowrl.skills.simulation import CAPACITY, entry_needs, ephemeral_items, simulate
from flowrl.skills.skill import Skill, Step

__all__ = ["SkillGraph", "simulate"]


class SkillGraph:
    """An immutable set of skills with their dependencies; the order of the skills breaks ties.

    Raises:
      GraphError: two skills have the same name, or names that share a slug.
    """

    def __init__(self, skills: Iterable[Skill] = (), *, capacity: int = CAPACITY) -> None:
        self.capacity = capacity
        self.skills: Mapping[str, Skill] = MappingProxyType(_by_name(skills))
        self._gainers = _gainers(self.skills)
        self._provider_of, self._rank = _providers(self.skills, self._gainers)
        self._edges = nx.DiGraph()
        self._edges.add_nodes_from(self._rank)
        for name in self._rank:
            self._edges.add_edges_from((need, name) for need in self._direct(name))

    def with_skill(self, skill: Skill) -> SkillGraph:
        """This graph and one more skill.

        Raises:
          CycleError: the skill would need itself.
          UnknownNeedError: it requires what no skill gains.
          GraphError: its name, or its name's slug, is taken.
        """
        grown = SkillGraph((*self.skills.values(), skill), capacity=self.capacity)
        grown._require_possible(skill.name)
        return grown

    def check(self) -> None:
        """Refuse a graph in which some skill can never be learned.

        Raises:
          CycleError, UnknownNeedError: with the circle drawn, or the missing gain named.
        """
        for name in self.skills:
            self._require_possible(name)

    def needs(self, name: str) -> tuple[str, ...]:
        """The direct providers of a skill's needs, in the order in which it names them.

        Raises:
          GraphError: the skill is unknown, or can never be learned.
        """
        self._require_possible(name)
        return self._direct(name)

    def all_needs(self, name: str) -> tuple[str, ...]:
        """All skills that a skill hangs on, each after its own needs.

        Raises:
          GraphError: the skill is unknown, or can never be learned.
        """
        self._require_possible(name)
        needed = nx.ancestors(self._edges, name)
        return tuple(other for other in self.order() if other in needed)

    def order(self) -> tuple[str, ...]:
        """Every skill that can be learned, each after its needs, else as in the library."""
        index = {name: place for place, name in enumerate(self.skills)}
        return tuple(nx.lexicographical_topological_sort(self._edges, key=index.__getitem__))

    def ready(self, done: Collection[str]) -> tuple[str, ...]:
        """The skills not in `done` whose direct needs all are, in the order of the library."""
        finished = frozenset(done)
        return tuple(
            name
            for name in self.skills
            if name in self._rank
            and name not in finished
            and finished.issuperset(self._edges.predecessors(name))
        )

    def plan(self, name: str, count: int = 1) -> tuple[Step, ...]:
        """The steps that lead from an empty inventory to this skill at this count.

        The last step is the skill itself, the others are among `all_needs(name)`. Counts are
        levels: see `flowrl.skills.simulation`. The same graph always gives the same plan.

        Raises:
          GraphError: the skill is unknown, can never be learned, or exceeds the capacity.
        """
        self._require_possible(name)
        if count < 1:
            raise GraphError(f"{name!r} × {count} is no goal; ask for a count of at least 1")
        planner = Planner(
            skills=self.skills,
            provider_of=self._provider_of,
            rank=self._rank,
            ephemeral=ephemeral_items(self.skills.values()),
            capacity=self.capacity,
        )
        return planner.plan(Step(skill=name, count=count))

    def _direct(self, name: str) -> tuple[str, ...]:
        items = entry_needs_at_any_count(self.skills[name])
        return tuple(dict.fromkeys(self._provider_of[item] for item in items))

    def _require_possible(self, name: str) -> None:
        if name not in self.skills:
            close = difflib.get_close_matches(name, self.skills, n=3, cutoff=0.5)
            raise GraphError(f"no skill {name!r}; closest are {_listed(close)}")
        if name not in self._rank:
            raise self._why_impossible(name)

    def _why_impossible(self, name: str) -> GraphError:
        """Follow needs that nobody provides until one is unknown or the path closes."""
        path = [name]
        while True:
            skill = self.skills[path[-1]]
            item = next(
                item for item in entry_needs_at_any_count(skill) if item not in self._provider_of
            )
            gainers = self._gainers.get(item, ())
            if not gainers:
                return self._unknown(skill, item)
            others = [gainer for gainer in gainers if gainer != skill.name]
            path.append((others or [skill.name])[0])
            if path[-1] in path[:-1]:
                circle = path[path.index(path[-1]) :]
                drawn = " → ".join(circle)
                return CycleError(f"skills need one another in a circle: {drawn}; drop one need")

    def _unknown(self, skill: Skill, item: str) -> UnknownNeedError:
        close = difflib.get_close_matches(item, self._gainers, n=3, cutoff=0.5)
        offers = [f"{gain} ({self._gainers[gain][0]})" for gain in close]
        what = f"{skill.name!r} requires {item!r}, which no skill gains"
        return UnknownNeedError(f"{what}; closest are {_listed(offers)}")


def entry_needs_at_any_count(skill: Skill) -> tuple[str, ...]:
    """The items that a skill requires or consumes at some count."""
    amounts = (*skill.requirements.items(), *skill.consumption.items())
    return tuple(dict.fromkeys(item for item, amount in amounts if amount))


def _by_name(skills: Iterable[Skill]) -> dict[str, Skill]:
    named: dict[str, Skill] = {}
    slugs: dict[str, str] = {}
    for skill in skills:
        other = slugs.get(slug(skill.name))
        if other is not None:
            what = f"the skills {other!r} and {skill.name!r} share the slug {slug(other)!r}"
            raise GraphError(f"{what}; rename one")
        named[skill.name], slugs[slug(skill.name)] = skill, skill.name
    return named


def _gainers(skills: Mapping[str, Skill]) -> dict[str, list[str]]:
    gainers: dict[str, list[str]] = {}
    for skill in skills.values():
        for item, amount in skill.gain.items():
            if amount:
                gainers.setdefault(item, []).append(skill.name)
    return gainers


def _providers(
    skills: Mapping[str, Skill], gainers: Mapping[str, list[str]]
) -> tuple[dict[str, str], dict[str, int]]:
    """Each item's provider and each possible skill's rank, by rounds of what can be learned."""
    able = _able(skills, gainers)
    provider_of: dict[str, str] = {}
    rank: dict[str, int] = {}
    waiting = list(skills)
    while True:
        learned = [
            name
            for name in waiting
            if all(item in provider_of for item in entry_needs_at_any_count(skills[name]))
        ]
        if not learned:
            return provider_of, rank
        rank |= {name: len(rank) + place for place, name in enumerate(learned)}
        waiting = [name for name in waiting if name not in rank]
        for item in {item for name in learned for item in skills[name].gain} - provider_of.keys():
            names = [name for name in learned if name in able.get(item, ())]
            if names:
                provider_of[item] = min(names, key=lambda name: not skills[name].gain[item].per)


def _able(
    skills: Mapping[str, Skill], gainers: Mapping[str, list[str]]
) -> dict[str, frozenset[str]]:
    """For each item, the skills that yield the most that one step asks for, if any does."""
    most: dict[str, int] = {}
    for skill in skills.values():
        for item, need in entry_needs(skill, 1).items():
            most[item] = max(most.get(item, 0), need)
    able: dict[str, frozenset[str]] = {}
    for item, names in gainers.items():
        enough = [n for n in names if skills[n].gain[item].least_n(most.get(item, 1)) is not None]
        able[item] = frozenset(enough or names)
    return able


def _listed(words: Collection[str]) -> str:
    return ", ".join(words) or "none"
