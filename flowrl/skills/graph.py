"""The graph of skills: which skill needs which, and plans.

Edges are derived: a skill depends on the skills whose gains it requires. Where several
skills yield enough of an item, the provider is chosen the same way every time: those that can be
learned earliest, among them one whose gain grows with its count, among them the first of the
library.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from functools import cached_property
from types import MappingProxyType

import networkx as nx

from flowrl.errors import GraphError
from flowrl.paths import slug
from flowrl.skills.planner import (
    CAPACITY,
    Planner,
    ephemeral_items,
    learnable,
    why_impossible,
)
from flowrl.skills.skill import Skill, Step


class SkillGraph:
    """An immutable set of skills with their dependencies; the order of the skills breaks ties.

    Raises:
      GraphError: two skills have the same name, or names that share a slug.
    """

    def __init__(self, skills: Iterable[Skill] = (), *, capacity: int = CAPACITY) -> None:
        self.capacity = capacity
        self.skills: Mapping[str, Skill] = MappingProxyType(_by_name(skills))
        self._found = learnable(self.skills, capacity=capacity)

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
        return self._found.direct[name]

    def all_needs(self, name: str) -> tuple[str, ...]:
        """All skills that must be learned before this one, each after its own needs.

        Raises:
          GraphError: the skill is unknown, or can never be learned.
        """
        self._require_possible(name)
        return tuple(other for other in self._order if other in self._needed[name])

    def order(self) -> tuple[str, ...]:
        """Every skill that can be learned, each after its needs, else as in the library."""
        return self._order

    def plan(self, name: str, count: int = 1) -> tuple[Step, ...]:
        """The steps that lead from an empty inventory to this skill at this count.

        The last step is the skill itself, the others are among `all_needs(name)`. Counts are
        levels: see `flowrl.skills.planner`. The same graph always gives the same plan.

        Raises:
          GraphError: the skill is unknown, can never be learned, or exceeds the capacity.
        """
        self._require_possible(name)
        if count < 1:
            raise GraphError(f"{name!r} × {count} is no goal; ask for a count of at least 1")
        needed = self._needed[name]
        planner = Planner(
            skills=self.skills,
            providers={
                item: tuple(gainer for gainer in gainers if gainer in needed)
                for item, gainers in self._found.gainers.items()
            },
            rank=self._found.rank,
            ephemeral=ephemeral_items(self.skills.values()),
            capacity=self.capacity,
        )
        return planner.plan(Step(skill=name, count=count))

    @cached_property
    def _order(self) -> tuple[str, ...]:
        edges = nx.DiGraph()
        edges.add_nodes_from(self._found.direct)
        for name, needs in self._found.direct.items():
            edges.add_edges_from((need, name) for need in needs)
        index = {name: place for place, name in enumerate(self.skills)}
        return tuple(nx.lexicographical_topological_sort(edges, key=index.__getitem__))

    @cached_property
    def _needed(self) -> Mapping[str, frozenset[str]]:
        """The needs of every skill, and theirs."""
        needed: dict[str, frozenset[str]] = {}
        for name in self._order:
            direct = self._found.direct[name]
            needed[name] = frozenset(direct).union(*(needed[need] for need in direct))
        return needed

    def _require_possible(self, name: str) -> None:
        if name not in self.skills:
            close = difflib.get_close_matches(name, self.skills, n=3, cutoff=0.5)
            raise GraphError(f"no skill {name!r}; closest are {', '.join(close) or 'none'}")
        if name not in self._found.rank:
            raise why_impossible(name, self.skills, self._found, capacity=self.capacity)


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
