"""From what a skill needs to the steps that provide it: regression, counting, pruning.

The plan is built backwards from the goal. Of what is needed at a moment, the ephemeral comes
first, so that its provider stands right before its consumer; tools that are made at the same spot
join it there; then what hangs on the most other skills, so that what many steps need is gathered
once, early. The order found, counts are the smallest that suffice, and steps that turn out
superfluous are taken out until none is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from flowrl.errors import GraphError
from flowrl.skills.simulation import entry_needs, needs_before, stays
from flowrl.skills.skill import Skill, Step

_STEP_LIMIT = 1_000


def count_for(skill: Skill, item: str, need: int, *, capacity: int) -> int | None:
    """The least count at which a skill yields this much of an item; None when none does."""
    count = skill.gain[item].least_n(need) if item in skill.gain else None
    if count is None or any(amount.at(count) > capacity for amount in skill.gain.values()):
        return None
    return count


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """All that planning knows: the skills, who provides each item, and the order among them."""

    skills: Mapping[str, Skill]
    providers: Mapping[str, Sequence[str]]  # item → skills that yield it, preferred first
    rank: Mapping[str, int]  # skill → its place in a topological order
    ephemeral: frozenset[str]
    capacity: int

    def plan(self, goal: Step) -> tuple[Step, ...]:
        """The steps that make the goal's needs true from an empty inventory, then the goal.

        Raises:
          GraphError: more of an item is needed at once than can be carried or provided.
        """
        self._check_goal(goal)
        names = [step.skill for step in self._ordered(goal)]
        return self._pruned(names, goal)

    def _check_goal(self, goal: Step) -> None:
        skill = self.skills[goal.skill]
        levels = {item: amount.at(goal.count) for item, amount in skill.gain.items()}
        for item, level in (*levels.items(), *entry_needs(skill, goal.count).items()):
            if level > self.capacity:
                what = f"{goal.skill} × {goal.count} needs or yields {level} {item}"
                raise GraphError(f"{what}; at most {self.capacity} can be carried")

    def _ordered(self, goal: Step) -> list[Step]:
        steps = [goal]
        needs = entry_needs(self.skills[goal.skill], goal.count)
        while needs:
            step, needs = self._step_before(needs, steps[-1])
            steps.append(step)
            if len(steps) > _STEP_LIMIT:
                raise GraphError(f"the plan for {goal.skill!r} has over {_STEP_LIMIT} steps")
        return steps[::-1]

    def _step_before(self, needs: Mapping[str, int], after: Step) -> tuple[Step, dict[str, int]]:
        """The first preferred step that can come right before `after`, and what it leaves."""
        for step in self._by_preference(needs):
            before = self._before(needs, step)
            if before is not None:
                return step, before
        wanted = ", ".join(f"{need} {item}" for item, need in sorted(needs.items()))
        raise GraphError(
            f"nothing can provide {wanted} before {after.skill!r} within a capacity of "
            f"{self.capacity}; lower what the skills require or consume"
        )

    def _by_preference(self, needs: Mapping[str, int]) -> list[Step]:
        found = {item: self._provider(item, need) for item, need in needs.items()}
        steps = {item: step for item, step in found.items() if step is not None}
        here = not self.ephemeral.isdisjoint(needs)

        def late_first(item: str) -> tuple[bool, int, str]:
            return item in self.ephemeral, -self.rank[steps[item].skill], item

        items = [item for item in steps if not here or self._stays(steps[item].skill)]
        return [steps[item] for item in sorted(items, key=late_first)]

    def _before(self, needs: Mapping[str, int], step: Step) -> dict[str, int] | None:
        """What must be there before the step; None when that can never be."""
        skill = self.skills[step.skill]
        before = needs_before(needs, skill, step.count, ephemeral=self.ephemeral)
        if before is None or not all(self._provider(*need) for need in before.items()):
            return None
        return before

    def _provider(self, item: str, need: int) -> Step | None:
        """The preferred skill that can reach this level, at the smallest count that does."""
        for name in self.providers.get(item, ()) if need <= self.capacity else ():
            count = count_for(self.skills[name], item, need, capacity=self.capacity)
            if count is not None:
                return Step(skill=name, count=count)
        return None

    def _stays(self, name: str) -> bool:
        return stays(self.skills[name], self.ephemeral)

    def _pruned(self, names: list[str], goal: Step) -> tuple[Step, ...]:
        steps = self._counted(names, goal)
        if steps is None:
            raise GraphError(f"no order of steps makes {goal.skill!r} possible")
        shorter = self._one_less(names, goal)
        while shorter is not None:
            names, steps = shorter
            shorter = self._one_less(names, goal)
        return steps

    def _one_less(self, names: list[str], goal: Step) -> tuple[list[str], tuple[Step, ...]] | None:
        for place in self._superfluous(names):
            shorter = names[:place] + names[place + 1 :]
            steps = self._counted(shorter, goal)
            if steps is not None:
                return shorter, steps
        return None

    def _superfluous(self, names: list[str]) -> Iterator[int]:
        """Places worth trying to leave out, last first: no needed item hangs on that step alone."""
        providers = Counter(item for name in names for item in self.skills[name].gain)
        needed = {item for name in names for item in entry_needs(self.skills[name], 1)}
        for place in range(len(names) - 2, -1, -1):
            if all(
                providers[item] > 1 or item not in needed for item in self.skills[names[place]].gain
            ):
                yield place

    def _counted(self, names: list[str], goal: Step) -> tuple[Step, ...] | None:
        """The steps in this order with the smallest counts; None when they do not succeed."""
        steps = [goal]
        needs: dict[str, int] | None = entry_needs(self.skills[goal.skill], goal.count)
        for name in reversed(names[:-1]):
            step = Step(skill=name, count=self._smallest_count(name, needs))
            needs = self._before(needs, step)
            if needs is None:
                return None
            steps.append(step)
        return tuple(reversed(steps)) if not needs else None

    def _smallest_count(self, name: str, needs: Mapping[str, int]) -> int:
        gain = self.skills[name].gain
        counts = [gain[item].least_n(needs[item]) or 1 for item in gain if item in needs]
        return max(counts, default=1)
