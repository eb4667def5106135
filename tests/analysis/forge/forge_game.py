"""A game whose recipes are few and known, for contracts that say something else."""

from __future__ import annotations

from pathlib import Path

from flowrl.games.base import Engine, Game


def make() -> Engine:
    """The engine, which alone needs JAX."""
    from forge_engine import ForgeEngine

    return ForgeEngine()


FORGE = Game(
    name="Forge-v1",
    observation_size=13,
    num_actions=4,
    capacity=9,
    features={
        "inventory": "berry, pie, ore, knife and grape, after the timestep",
        "inventory_diff": "their change in this timestep",
        "fed": "bool: the player has feasted",
        "fed_diff": "int: 1 in the timestep of the feast",
        "cell": "int: where the player stands, 0 to 6",
        "cell_prev": "int: where it stood before",
    },
    items=frozenset({"berry", "pie", "ore", "knife", "grape"}),
    constants="forge_engine",
    enums={"Cell": frozenset({"OVEN", "FORGE", "TABLE", "ROCK", "VINE", "BUSH"})},
    library_folder=Path(__file__).parent / "forge_skills",
    sources=("forge_game", "forge_engine"),
    make=make,
)
