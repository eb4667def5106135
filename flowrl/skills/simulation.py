"""What steps do to what the agent has, forwards (`simulate`) and backwards (`needs_before`).

**Counts are levels.** A step with count n ends when its skill's done-condition holds at n, and
then the agent has *at least* `gain.at(n)` of each gained item: the level n is reached, not added.
Collect Wood × 3 with one wood in the bag yields three wood, not four. Before the step the agent
must have `requirements.at(n)`, and `consumption.at(n)` is taken away during it: the most that it
can cost, also where part of the level was there already. What is simulated is thus a lower bound,
and a plan that succeeds here never asks for an item that it did not provide for.

So the count of a provider is the *whole* amount that later steps need of the item until the next
provider of it: what they consume together, or the largest amount that one of them must see.

**Facts.** Resources, tools and achievements are all items: a tool is an item that nobody consumes.
An ephemeral item (near a table) lasts only while the player stays. A step *stays* when it requires
or gains an ephemeral item (placing, crafting); any other step may walk away, and ends them all.

**Capacity.** No level can be above the capacity of the inventory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain

from flowrl.errors import GraphError
from flowrl.skills.skill import Skill, Step

CAPACITY = 9  # of each item in Craftax-Classic; full Craftax holds 99


def simulate(
    skills: Mapping[str, Skill], steps: Iterable[Step], *, capacity: int = CAPACITY
) -> dict[str, int]:
    """What the agent has after the steps, from an empty inventory.

    Raises:
      GraphError: a step is unknown, lacks what it requires, or exceeds the capacity.
    """
    ephemeral = ephemeral_items(skills.values())
    levels: dict[str, int] = {}
    for place, step in enumerate(steps):
        skill = skills.get(step.skill)
        if skill is None:
            raise GraphError(f"step {place}, {_said(step)}, is of an unknown skill")
        for item, need in entry_needs(skill, step.count).items():
            if levels.get(item, 0) < need:
                has = f"has {levels.get(item, 0)}"
                raise GraphError(f"step {place}, {_said(step)}, needs {need} {item} and {has}")
        levels = _levels_after(levels, skill, step, ephemeral)
        for item, level in levels.items():
            if level > capacity:
                what = f"step {place}, {_said(step)}, would reach {level} {item}"
                raise GraphError(f"{what}, above the capacity of {capacity}")
    return levels


def entry_needs(skill: Skill, count: int) -> dict[str, int]:
    """What must be there when a step starts: what it requires or consumes, item by item."""
    needs: dict[str, int] = {}
    for item, amount in chain(skill.requirements.items(), skill.consumption.items()):
        if amount.at(count) > 0:
            needs[item] = max(needs.get(item, 0), amount.at(count))
    return needs


def needs_before(
    needs: Mapping[str, int], skill: Skill, count: int, *, ephemeral: frozenset[str]
) -> dict[str, int] | None:
    """What must be there before a step so that `needs` holds after it.

    None when it cannot: the step would end an ephemeral item that is needed after it.
    """
    before = {
        item: need
        for item, need in needs.items()
        if item not in skill.gain or skill.gain[item].at(count) < need
    }
    if not stays(skill, ephemeral) and not ephemeral.isdisjoint(before):
        return None
    for item, amount in skill.consumption.items():
        if item in before:
            before[item] += amount.at(count)
    for item, need in entry_needs(skill, count).items():
        before[item] = max(before.get(item, 0), need)
    return before


def ephemeral_items(skills: Iterable[Skill]) -> frozenset[str]:
    """The items that any of the skills calls ephemeral."""
    return frozenset(chain.from_iterable(skill.ephemeral for skill in skills))


def stays(skill: Skill, ephemeral: frozenset[str]) -> bool:
    """Whether ephemeral items outlast the skill: it requires or gains one itself."""
    return any(item in ephemeral for item in chain(skill.requirements, skill.gain))


def _levels_after(
    levels: Mapping[str, int], skill: Skill, step: Step, ephemeral: frozenset[str]
) -> dict[str, int]:
    kept = stays(skill, ephemeral)
    after = {item: level for item, level in levels.items() if kept or item not in ephemeral}
    for item, amount in skill.consumption.items():
        after[item] = after.get(item, 0) - amount.at(step.count)
    for item, amount in skill.gain.items():
        after[item] = max(after.get(item, 0), amount.at(step.count))
    return {item: level for item, level in after.items() if level > 0}


def _said(step: Step) -> str:
    return f"{step.skill} × {step.count}"
