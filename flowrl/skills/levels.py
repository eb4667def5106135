"""Levels: what steps need and yield.

**Counts are levels.** A step with count n ends when its skill's done-condition holds at n, and
then the agent has *at least* `gain.at(n)` of each gained item: the level n is reached, not added.
Collect Wood × 3 with one wood in the bag yields three wood, not four. Before the step the agent
must have `requirements.at(n)`, and `consumption.at(n)` is taken away during it: the most that it
can cost, also where part of the level was there already. What is computed is thus a lower bound,
and a plan that succeeds here never asks for an item that it did not provide for.

So the count of a provider is the *whole* amount that later steps need of the item until the next
provider of it: what they consume together, or the largest amount that one of them must see.

**Facts.** Resources, tools and achievements are all items; no skill consumes a tool.
An ephemeral item (near a table) lasts only while the player stays. A step *stays* when it requires
or gains an ephemeral item (placing, crafting); any other step may walk away, and ends them all.

**Capacity.** No level can be above the capacity of the inventory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

from flowrl.errors import GraphError
from flowrl.skills.floors import Floors
from flowrl.skills.skill import ON_FLOOR, Skill, Step

CAPACITY = 9  # of each item, unless the game says another


def entry_needs(skill: Skill, count: int) -> dict[str, int]:
    """Return the items that must be there when a step starts: those it requires or consumes."""
    needs: dict[str, int] = {}
    for item, amount in chain(skill.requirements.items(), skill.consumption.items()):
        if amount.at(count) > 0 and item != ON_FLOOR:
            needs[item] = max(needs.get(item, 0), amount.at(count))
    return needs


def excess(skill: Skill, count: int, *, capacity: int) -> str:
    """Return which amount of a step is over the capacity of the inventory, "" for none."""
    levels = {item: amount.at(count) for item, amount in skill.gain.items()}
    for item, level in (*levels.items(), *entry_needs(skill, count).items()):
        if level > capacity:
            what = f"{skill.name} × {count} needs or yields {level} {item}"
            return f"{what}; at most {capacity} can be carried"
    return ""


def needs_before(
    needs: Mapping[str, int], skill: Skill, count: int, *, ephemeral: frozenset[str]
) -> dict[str, int] | None:
    """Return the items that must be there before a step so that `needs` holds after it.

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


def kept_needs(
    steps: Sequence[Step], skills: Mapping[str, Skill], *, ephemeral: frozenset[str]
) -> list[dict[str, int]]:
    """For each step of a plan, the items that it must leave for later steps, and how many.

    Items that the step itself yields in that amount are not among them. The floor is, if a later
    step must be done there and this one leads to no other.
    """
    kept: list[dict[str, int]] = []
    needs: dict[str, int] = {}
    floors, later = Floors(skills.values()), False
    for step in reversed(steps):
        gain = skills[step.skill].gain
        own = {item for item, need in needs.items() if item in gain}
        own = {item for item in own if gain[item].at(step.count) >= needs[item]}
        kept.append({item: need for item, need in needs.items() if item not in own})
        moves = ON_FLOOR in gain
        kept[-1] |= {ON_FLOOR: 1} if later and not moves else {}
        later = floors.starts(skills[step.skill], step.count) < floors.all or (later and not moves)
        before = needs_before(needs, skills[step.skill], step.count, ephemeral=ephemeral)
        if before is None:
            raise GraphError(f"{step.skill} ends what a later step needs: {', '.join(needs)}")
        needs = before
    return kept[::-1]


def ephemeral_items(skills: Iterable[Skill]) -> frozenset[str]:
    """The items that any of the skills calls ephemeral."""
    return frozenset(chain.from_iterable(skill.ephemeral for skill in skills))


def stays(skill: Skill, ephemeral: frozenset[str]) -> bool:
    """Return whether ephemeral items outlast the skill.

    It requires or gains one itself, and leads to no other floor.
    """
    if ON_FLOOR in skill.gain:
        return False
    return any(item in ephemeral for item in chain(skill.requirements, skill.gain))


def count_for(skill: Skill, item: str, need: int, *, capacity: int) -> int | None:
    """The least count at which a skill yields this much of an item; None when none does."""
    count = skill.gain[item].least_n(need) if item in skill.gain else None
    if count is None or any(amount.at(count) > capacity for amount in skill.gain.values()):
        return None
    return count


def direct_needs(skill: Skill) -> dict[str, int]:
    """Return the needs of a skill at count 1, and 1 of each need of higher counts only."""
    amounts = (*skill.requirements.items(), *skill.consumption.items())
    needs = {item: 1 for item, amount in amounts if amount and item != ON_FLOOR}
    return needs | entry_needs(skill, 1)


def able(skills: Iterable[Skill], item: str, need: int, *, capacity: int) -> Iterator[str]:
    """Those of the skills that can yield this much of an item at some count."""
    for skill in skills:
        if count_for(skill, item, need, capacity=capacity) is not None:
            yield skill.name
