"""A game in two files: a row of five cells with a bush at one end and an oven at the other."""

from __future__ import annotations

from pathlib import Path

from flowrl.games.base import Engine, Game


def make() -> Engine:
    """The engine, which alone needs JAX."""
    from tiny_engine import TinyEngine

    return TinyEngine()


def renderer():
    """Draws a world as a row of grey cells, the player's white."""
    from tiny_engine import draw

    return draw


TINY = Game(
    name="Tiny-v1",
    observation_size=7,
    num_actions=4,
    capacity=9,
    features={
        "inventory": "berry and pie, after the timestep",
        "inventory_diff": "the change of both in this timestep",
        "cell": "int: where the player stands, 0 to 4",
        "cell_diff": "int: -1, 0 or 1",
        "timestep": "int: timesteps of the plan's step, from 1",
        "episode_timestep": "int: timesteps of the episode, from 1",
    },
    items=frozenset({"berry", "pie"}),
    constants="tiny_engine",
    enums={"Cell": frozenset({"OVEN", "BUSH"})},
    library_folder=Path(__file__).parent / "tiny_skills",
    sources=("tiny_game", "tiny_engine"),
    make=make,
    renderer=renderer,
)
