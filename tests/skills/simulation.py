"""Plans forwards: what the agent has after each step, the oracle of the planner."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from flowrl.errors import GraphError
from flowrl.skills.planner import CAPACITY, entry_needs, ephemeral_items, stays
from flowrl.skills.skill import Skill, Step


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
            raise GraphError(f"step {place}, {_shown(step)}, is of an unknown skill")
        for item, need in entry_needs(skill, step.count).items():
            if levels.get(item, 0) < need:
                has = f"has {levels.get(item, 0)}"
                raise GraphError(f"step {place}, {_shown(step)}, needs {need} {item} and {has}")
        levels = _levels_after(levels, skill, step, ephemeral)
        for item, level in levels.items():
            if level > capacity:
                what = f"step {place}, {_shown(step)}, would reach {level} {item}"
                raise GraphError(f"{what}, above the capacity of {capacity}")
    return levels


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


def _shown(step: Step) -> str:
    return f"{step.skill} × {step.count}"
