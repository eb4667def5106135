"""Generated modules and worlds for the tests of environments, written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from flowrl.games.base import find_game

CLASSIC = "Craftax-Classic-Symbolic-v1"
FULL = "Craftax-Symbolic-v1"
GAMES = {"craftax_classic": CLASSIC, "craftax": FULL, "tiny": "Tiny-v1"}


class Written(NamedTuple):
    """One step of a module's plan, as text."""

    skill: str
    expert: int
    is_done: str
    reward: str
    count: int = 1


WOOD = Written(
    skill="Collect Wood",
    expert=0,
    count=2,
    is_done="(inventory, n=2):\n    return inventory.wood >= n",
    reward="(inventory_diff):\n    return inventory_diff.wood",
)
STONE = Written(
    skill="Collect Stone",
    expert=5,
    is_done="(inventory, n=1):\n    return inventory.stone >= n",
    reward="(inventory_diff, inventory):\n    return 10 * inventory_diff.stone, inventory.wood / 4",
)
COAL = Written(
    skill="Collect Coal",
    expert=2,
    is_done="(inventory, n=1):\n    return inventory.coal >= n",
    reward="(inventory):\n    return jnp.where(inventory.diamond > 0, jnp.log(-1.0), 0.5)",
)
PLAN = (WOOD, STONE, COAL)
BERRY = Written(
    skill="Pick Berry",
    expert=0,
    count=2,
    is_done="(inventory, n=2):\n    return inventory.berry >= n",
    reward="(inventory_diff):\n    return inventory_diff.berry",
)
PIE = Written(
    skill="Bake Pie",
    expert=5,
    is_done="(inventory, n=1):\n    return inventory.pie >= n",
    reward="(inventory_diff):\n    return inventory_diff.pie",
)


def module_text(steps: Sequence[Written] = PLAN, *, package: str = "craftax_classic") -> str:
    """A generated module's text."""
    experts = sorted({step.expert for step in steps})
    plan = [{"skill": s.skill, "count": s.count, "expert": s.expert} for s in steps]
    parts = [
        '"""Run of a skill, for a test."""',
        f"import jax\nimport jax.numpy as jnp\n{find_game(GAMES[package]).import_line}",
        f"GAME = {GAMES[package]!r}",
        f"GLOBAL_TO_LOCAL = { {expert: local for local, expert in enumerate(experts)} }",
        f"LOCAL_TO_GLOBAL = {dict(enumerate(experts))}",
        f"PLAN = {plan}",
    ]
    for k, step in enumerate(steps):
        parts += [
            f"def task_{k}_is_done{step.is_done}",
            f"def task_{k}_reward{step.reward}",
            f"def task_{k}_network_number():\n    return GLOBAL_TO_LOCAL[{step.expert}]",
        ]
    return "\n\n".join(parts) + "\n"


def with_items(state: Any, **items: int) -> Any:
    """The state with this many of each item in every inventory."""
    world, inventory = state.world, state.world.inventory
    filled = {name: getattr(inventory, name) * 0 + count for name, count in items.items()}
    if isinstance(inventory, tuple):  # the tiny game's
        return state._replace(world=world._replace(inventory=inventory._replace(**filled)))
    return state._replace(world=world.replace(inventory=inventory.replace(**filled)))
