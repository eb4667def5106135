"""Plans: which steps lead to a skill.

**Floors.** A step can be done on some floors (`flowrl.skills.floors`). Backwards, a plan knows the
floors on which the player may be. What can be provided there comes first, and of that what is
farthest from the first floor. Where nothing can, the way from the nearest floor where something
can be provided comes before.

**Planning.** A plan is built backwards from the goal. Of what is needed at a moment, the ephemeral
comes first, so that its provider stands right before its consumer; tools that are made at the same
place join it there; then the item whose provider needs the most other skills, so that what many
steps need is gathered once, early. What the inventory cannot hold at once is gathered again, as
early as possible; so is what is over a skill's `max_count`, unless there is no such plan. Then
counts are the smallest that suffice, and steps that are superfluous are removed until none is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from flowrl.errors import GraphError
from flowrl.skills.floors import START, Floors, Move, counts_floors, reached_by, route
from flowrl.skills.learnable import Learnable
from flowrl.skills.levels import count_for, entry_needs, excess, needs_before
from flowrl.skills.skill import ON_FLOOR, Skill, Step

_STEP_LIMIT, _LONGEST = 1_000, 400


class _Before(NamedTuple):
    """A step that may come before another, and what must be there when it starts."""

    step: Step
    needs: dict[str, int]
    floors: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """A step of a plan under way, and what may come right before it."""

    step: Step
    needs: dict[str, int]  # what must be there when the step starts
    floors: frozenset[int]  # where the player must be then
    chosen: Mapping[str, str]  # the provider of each of them
    before: Iterator[_Before]  # the preferred first


@dataclass(frozen=True, kw_only=True)
class Planner:
    """The planner's input: the skills, those that may be steps, and how they were learned."""

    skills: Mapping[str, Skill]
    learned: Learnable
    needed: Collection[str]  # the skills that the goal's needs may come from
    ephemeral: frozenset[str]
    floors: Floors
    capacity: int
    limited: bool = True  # by each skill's `max_count`

    def plan(self, goal: Step) -> tuple[Step, ...]:
        """The steps that make the goal's needs true from an empty inventory, then the goal.

        Raises GraphError if more of an item is needed at once than can be carried or provided.
        """
        if said := excess(self.skills[goal.skill], goal.count, capacity=self.capacity):
            raise GraphError(said)
        try:
            return self._pruned(self._ordered(goal))
        except GraphError:
            if not self.limited:
                raise
        return replace(self, limited=False).plan(goal)

    def _ordered(self, goal: Step) -> list[Step]:
        """The steps in order, found from the goal backwards, depth first.

        Where nothing can come before a step, because more would have to be carried than the
        inventory holds, the latest place that has another preferred step takes that one.
        """
        chosen = self.learned.chosen[goal.skill]
        path, seen, stuck = [self._place(self._first(goal), chosen)], set[object](), ""
        for _ in range(_STEP_LIMIT):
            if len(path) > _LONGEST:
                break
            place = path[-1]
            if not place.needs and START in place.floors:
                return [each.step for each in reversed(path)]
            before = next(place.before, None)
            if before is not None:
                state = frozenset(before.needs.items()), before.floors
                if state in seen:  # nothing could come before it, or it goes round in a circle
                    continue
                seen.add(state)
                chosen = self._chosen(before.needs, place.chosen, before.step.skill)
                path.append(self._place(before, chosen))
                continue
            stuck = stuck or self._nothing_before(place)
            path.pop()
            if not path:
                break
        raise GraphError(stuck or f"the plan for {goal.skill!r} has over {_LONGEST} steps")

    def _first(self, goal: Step) -> _Before:
        """The goal, with what must be there when it starts."""
        skill = self.skills[goal.skill]
        starts = self.floors.starts(skill, goal.count) & self._reached
        if not starts:
            what = f"{goal.skill!r} × {goal.count} is done on a floor to which nothing leads"
            raise GraphError(f"{what} that it needs; ask for another count")
        return _Before(goal, entry_needs(skill, goal.count), starts)

    def _chosen(
        self, needs: Mapping[str, int], before: Mapping[str, str], skill: str
    ) -> dict[str, str]:
        """The provider of each need, also of those that the step of this skill added.

        Of the choices of two skills that of lower rank holds: it needs neither of them.
        """
        choices = (before, self.learned.chosen[skill])
        options = {item: [choice[item] for choice in choices if item in choice] for item in needs}
        return {
            item: min(names, key=self.learned.rank.__getitem__) for item, names in options.items()
        }

    def _place(self, found: _Before, chosen: Mapping[str, str]) -> _Place:
        step, needs, floors = found
        options = (
            self._before(needs, floors, each) for each in self._by_preference(needs, floors, chosen)
        )
        before = (each for each in options if each is not None)
        return _Place(step=step, needs=needs, floors=floors, chosen=chosen, before=before)

    def _nothing_before(self, place: _Place) -> str:
        wanted = ", ".join(f"{need} {item}" for item, need in sorted(place.needs.items()))
        if START not in place.floors:
            wanted += f"{', ' if wanted else ''}{ON_FLOOR} {min(place.floors)}"
        return (
            f"nothing can provide {wanted} before {place.step.skill!r} within a capacity of "
            f"{self.capacity}; lower what the skills require or consume"
        )

    def _by_preference(
        self, needs: Mapping[str, int], floors: frozenset[int], chosen: Mapping[str, str]
    ) -> Iterator[Step]:
        """The providers, or the moves from where they can be; then those that should be elsewhere.

        What takes a player the farthest from the first floor comes first, so late in the plan.
        """
        providers = {item: self._provider(item, need, chosen[item]) for item, need in needs.items()}
        steps = {item: step for item, step in providers.items() if step is not None}

        def late_first(item: str) -> tuple[bool, int, int, str]:
            name = steps[item].skill
            return item in self.ephemeral, -self._depths[name], -self.learned.rank[name], item

        elsewhere = []
        for step in [steps[item] for item in sorted(steps, key=late_first)]:
            if way := self._way(step.skill, floors):
                yield way[-1].step
                elsewhere.append(step)
            else:
                yield step
        if not needs and (way := route(self._moves, {START}, floors)):
            yield way[-1].step
        yield from elsewhere

    def _way(self, name: str, floors: frozenset[int]) -> tuple[Move, ...] | None:
        """The moves from where a skill should be done to one of the floors."""
        ends, depth = self.floors.ends(self.skills[name]) & self._reached, self.floors.depths
        if ends & floors and self._depths[name] >= min(depth[floor] for floor in floors):
            return ()
        home = {floor for floor in ends if depth[floor] <= self._depths[name]}
        return route(self._moves, home, floors)

    def _before(
        self, needs: Mapping[str, int], floors: frozenset[int], step: Step
    ) -> _Before | None:
        """Return what must be there before the step; None when that can never be."""
        skill = self.skills[step.skill]
        starts = self.floors.before(floors, skill, step.count) & self._reached
        before = needs_before(needs, skill, step.count, ephemeral=self.ephemeral)
        if not starts or before is None:
            return None
        if not all(self._provider(*need) for need in before.items()):
            return None
        return _Before(step, before, starts)

    def _provider(self, item: str, need: int, first: str | None = None) -> Step | None:
        """The preferred skill that can reach this level, at the smallest count that does."""
        gainers = [name for name in self.learned.gainers.get(item, ()) if name in self.needed]
        for name in [first, *gainers] if first else gainers:
            count = count_for(self.skills[name], item, need, capacity=self.capacity)
            if count is not None and self._is_few(name, count):
                return Step(skill=name, count=count)
        return None

    def _is_few(self, name: str, count: int) -> bool:
        most = self.skills[name].max_count
        return not self.limited or most is None or count <= most

    def _pruned(self, steps: list[Step]) -> tuple[Step, ...]:
        counted = self._counted(steps)
        if counted is None:
            raise GraphError(f"no order of steps makes {steps[-1].skill!r} possible")
        while shorter := next(self._shorter(counted), None):
            counted = shorter
        return counted

    def _shorter(self, steps: Sequence[Step]) -> Iterator[tuple[Step, ...]]:
        """The plans that succeed without one step, or without two moves; a late step goes first.

        A step on which alone a needed item hangs is not tried.
        """
        skills = [self.skills[step.skill] for step in steps]
        providers = Counter(item for skill in skills for item in skill.gain)
        needed = {item for skill in skills for item in entry_needs(skill, 1)}
        named = {other for skill in skills for other in skill.provided_by.values()}
        moves = [place for place in range(len(steps) - 1) if ON_FLOOR in skills[place].gain]
        pairs = [{one, other} for one in moves for other in moves if one < other]
        for left_out in (*({place} for place in range(len(steps) - 2, -1, -1)), *pairs):
            gains = [item for place in left_out for item in skills[place].gain]
            alone = any(item in needed and providers[item] == 1 for item in gains)
            if alone or any(steps[place].skill in named for place in left_out):
                continue
            rest = [step for place, step in enumerate(steps) if place not in left_out]
            if counted := self._counted(rest):
                yield counted

    def _counted(self, steps: Sequence[Step]) -> tuple[Step, ...] | None:
        """The steps in this order with the smallest counts; None when they do not succeed."""
        found = [self._first(steps[-1])]
        for given in reversed(steps[:-1]):
            (_, needs, floors), skill, step = found[-1], self.skills[given.skill], given
            if not counts_floors(skill):
                step = Step(skill=given.skill, count=self._smallest_count(given.skill, needs))
            held = all(amount.at(step.count) <= self.capacity for amount in skill.gain.values())
            if not held or not self._is_few(step.skill, step.count):
                return None
            before = self._before(needs, floors, step)
            if before is None:
                return None
            found.append(before)
        possible = not found[-1].needs and START in found[-1].floors
        return tuple(each.step for each in reversed(found)) if possible else None

    def _smallest_count(self, name: str, needs: Mapping[str, int]) -> int:
        gain = self.skills[name].gain
        counts = [gain[item].least_n(needs[item]) or 1 for item in gain if item in needs]
        return max(counts, default=1)

    @cached_property
    def _moves(self) -> list[Move]:
        """The moves that may be steps."""
        return [move for move in self.floors.moves if move.step.skill in self.needed]

    @cached_property
    def _reached(self) -> frozenset[int]:
        """The floors to which the moves lead that may be steps."""
        return reached_by(self._moves)

    @cached_property
    def _depths(self) -> Mapping[str, int]:
        """The distance from the first floor that a player must go for each skill."""
        depths: dict[str, int] = {}
        for name in sorted(self.needed, key=self.learned.rank.__getitem__):
            ends = self.floors.ends(self.skills[name]) & self._reached
            own = min((self.floors.depths[floor] for floor in ends), default=0)
            needs = self.learned.chosen[name].items()
            others = (depths[other] for item, other in needs if item in self.learned.gainers)
            depths[name] = max([own, *others])
        return depths
