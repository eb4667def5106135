"""Floors: where skills can be done, and which skills lead from one floor to another.

`on_floor` is an item whose amount is exact. A skill that requires it is done on that floor alone,
one that gains it leads there, from any other floor without such a requirement. `floors` names the
floors where a skill can be done; without either, it can be done on all. The player begins on
floor 0 and is on one floor at a time: a step that leads to another ends every ephemeral item.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from flowrl.skills.skill import ON_FLOOR, Skill, Step

START = 0  # the floor of a new world


class Move(NamedTuple):
    """A step that leads from one floor to another."""

    step: Step
    source: int
    target: int


def begins_anew(skill: Skill) -> bool:
    """Return whether a skill can be the first step in a new world and leads nowhere else."""
    exact = skill.requirements.get(ON_FLOOR)
    elsewhere = exact is not None and (exact.per > 0 or exact.base != START)
    return START in (skill.floors or (START,)) and not elsewhere and ON_FLOOR not in skill.gain


def counts_floors(skill: Skill) -> bool:
    """Return whether the floor of a skill depends on its count."""
    amounts = (skill.requirements.get(ON_FLOOR), skill.gain.get(ON_FLOOR))
    return any(amount is not None and amount.per for amount in amounts)


class Floors:
    """The floors that some skills speak of, and the moves between them.

    Without a skill that speaks of floors, there is one, and no moves.
    """

    def __init__(self, skills: Iterable[Skill]) -> None:
        skills = list(skills)
        named = {START}.union(*(skill.floors for skill in skills))
        for skill in skills:
            amounts = (skill.requirements.get(ON_FLOOR), skill.gain.get(ON_FLOOR))
            named |= {each.base for each in amounts if each is not None and not each.per}
        self.all = frozenset(range(max(named) + 1))
        leading = [skill for skill in skills if ON_FLOOR in skill.gain]
        self.moves = [move for skill in leading for move in self._moves(skill)]
        ways = {floor: route(self.moves, {START}, {floor}) for floor in self.all}
        self.depths = {floor: len(way) for floor, way in ways.items() if way is not None}

    def _moves(self, skill: Skill) -> list[Move]:
        moves: dict[tuple[int, int], Move] = {}
        for count in range(1, len(self.all) + 2):
            target = skill.gain[ON_FLOOR].at(count)
            for source in sorted(self.starts(skill, count)) if target in self.all else ():
                step = Step(skill=skill.name, count=count)
                moves.setdefault((source, target), Move(step, source, target))
        return list(moves.values())

    def starts(self, skill: Skill, count: int) -> frozenset[int]:
        """The floors on which a step can start; one that leads to a floor not on that."""
        starts = self.all.intersection(skill.floors) if skill.floors else self.all
        exact, target = skill.requirements.get(ON_FLOOR), skill.gain.get(ON_FLOOR)
        if exact is not None:
            starts &= {exact.at(count)}
        return starts if target is None else starts - {target.at(count)}

    def before(self, after: frozenset[int], skill: Skill, count: int) -> frozenset[int]:
        """The floors on which a step can start so that the player is on one of `after` then."""
        starts = self.starts(skill, count)
        if ON_FLOOR not in skill.gain:
            return starts & after
        return starts if skill.gain[ON_FLOOR].at(count) in after else frozenset()

    def places(self, skill: Skill) -> frozenset[int]:
        """The floors on which a skill can start at some count."""
        counts = range(1, len(self.all) + 2)
        return frozenset().union(*(self.starts(skill, count) for count in counts))

    def ends(self, skill: Skill) -> frozenset[int]:
        """The floors on which a player can be when the skill is done."""
        if ON_FLOOR not in skill.gain:
            return self.places(skill)
        return frozenset(move.target for move in self.moves if move.step.skill == skill.name)


def route(
    moves: Sequence[Move], sources: Iterable[int], targets: Iterable[int]
) -> tuple[Move, ...] | None:
    """The fewest moves from one of the sources to one of the targets; None without any way.

    Of several as short the first in the order of the moves.
    """
    targets = frozenset(targets)
    ways: dict[int, tuple[Move, ...]] = {floor: () for floor in sorted(sources)}
    unseen = deque(ways)
    while unseen:
        floor = unseen.popleft()
        if floor in targets:
            return ways[floor]
        for move in moves:
            if move.source == floor and move.target not in ways:
                ways[move.target] = (*ways[floor], move)
                unseen.append(move.target)
    return None


def reached_by(moves: Sequence[Move], sources: Iterable[int] = (START,)) -> frozenset[int]:
    """The floors to which moves lead from some, and these."""
    reached = {*sources}
    while new := {move.target for move in moves if move.source in reached} - reached:
        reached |= new
    return frozenset(reached)
