"""Plans forwards: what the agent has after each step, the oracle of the planner."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from flowrl.errors import GraphError
from flowrl.skills.levels import CAPACITY, entry_needs, ephemeral_items, stays
from flowrl.skills.skill import Skill, Step


def simulate(
    skills: Mapping[str, Skill], steps: Iterable[Step], *, capacity: int = CAPACITY
) -> dict[str, int]:
    """What the agent has after the steps, from an empty inventory on floor 0.

    Raises:
      GraphError: a step is unknown, lacks what it requires, is done on another floor, or exceeds
        the capacity.
    """
    ephemeral = ephemeral_items(skills.values())
    levels: dict[str, int] = {}
    floor = 0
    for place, step in enumerate(steps):
        skill = skills.get(step.skill)
        if skill is None:
            raise GraphError(f"step {place}, {_shown(step)}, is of an unknown skill")
        for item, need in entry_needs(skill, step.count).items():
            if levels.get(item, 0) < need:
                has = f"has {levels.get(item, 0)}"
                raise GraphError(f"step {place}, {_shown(step)}, needs {need} {item} and {has}")
        if not may_start(skill, step.count, floor):
            raise GraphError(f"step {place}, {_shown(step)}, is not done on floor {floor}")
        levels, floor = after(levels, floor, skill, step.count, ephemeral)
        for item, level in levels.items():
            if level > capacity:
                what = f"step {place}, {_shown(step)}, would reach {level} {item}"
                raise GraphError(f"{what}, above the capacity of {capacity}")
    return levels


def may_start(skill: Skill, count: int, floor: int) -> bool:
    """Whether the player can begin a step on this floor; not where it leads to already."""
    exact, target = skill.requirements.get("on_floor"), skill.gain.get("on_floor")
    here = not skill.floors or floor in skill.floors
    here &= exact is None or exact.at(count) == floor
    return here and (target is None or target.at(count) != floor)


def after(
    levels: Mapping[str, int], floor: int, skill: Skill, count: int, ephemeral: frozenset[str]
) -> tuple[dict[str, int], int]:
    """The levels and the floor after a step."""
    moves = "on_floor" in skill.gain
    kept = stays(skill, ephemeral) and not moves
    changed = {item: level for item, level in levels.items() if kept or item not in ephemeral}
    for item, amount in skill.consumption.items():
        changed[item] = changed.get(item, 0) - amount.at(count)
    for item, amount in skill.gain.items():
        if item != "on_floor":
            changed[item] = max(changed.get(item, 0), amount.at(count))
    floor = skill.gain["on_floor"].at(count) if moves else floor
    return {item: level for item, level in changed.items() if level > 0}, floor


def _shown(step: Step) -> str:
    return f"{step.skill} × {step.count}"
