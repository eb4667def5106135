"""Skills made in a line, for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flowrl.skills.skill import Skill, skill_from_data

IS_DONE = "def task_is_done(inventory, n):\n    return inventory.wood >= n"
REWARD = "def task_reward(inventory_diff):\n    return inventory_diff.wood"


def skill(
    name: str,
    gain: Mapping[str, object],
    needs: Mapping[str, object] | None = None,
    *,
    uses: Mapping[str, object] | None = None,
    ephemeral: tuple[str, ...] = (),
    floors: Sequence[int] | None = None,
    max_count: int | None = None,
) -> Skill:
    """A skill that gains, needs and uses up items, on some floors."""
    data = {"requirements": dict(needs or {}), "consumption": dict(uses or {}), "gain": dict(gain)}
    code: dict[str, object] = {"is_done": IS_DONE, "reward": REWARD}
    if floors is not None:
        code["floors"] = list(floors)
    if max_count is not None:
        code["max_count"] = max_count
    return skill_from_data(name, {**data, **code, "ephemeral": list(ephemeral)})


def skill_text(is_done: str = IS_DONE, reward: str = REWARD, *, head: str = "") -> str:
    """A skill file."""
    constants = 'name = "Collect Wood"\nrequirements = {}\nconsumption = {}\ngain = {"wood": "n"}\n'
    return f'"""Harvest wood."""\n{head}{constants}\n\n{is_done}\n\n\n{reward}\n'
