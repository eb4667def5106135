"""MiniGrid's games as navix plays them in JAX: doors and keys in rooms; a leaf.

Nothing here imports JAX or navix: that does `navix_engine`, when a game is made.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from flowrl.errors import ConfigError, closest
from flowrl.games.base import Game, check_extra

_LIBRARY = Path(__file__).parents[2] / "skills" / "library"
# Rows and columns of each game that navix has of a kind.
_SQUARES = {
    **{f"DoorKey-{kind}{n}x{n}": n for kind in ("", "Random-") for n in (5, 6, 8, 16)},
    **{f"KeyCorridorS{n}R3": 3 * n - 2 for n in (3, 4, 5, 6)},
}
SHAPES = {
    **{f"Navix-{kind}-v0": (n, n) for kind, n in _SQUARES.items()},
    **{"Navix-KeyCorridorS3R1-v0": (3, 7), "Navix-KeyCorridorS3R2-v0": (5, 7)},
}
# What an observation shows of each cell; the last four say where the player faces.
CHANNELS = (
    *("wall", "key", "closed door", "locked door", "open door", "goal", "the player has the key"),
    *("player to the east", "player to the south", "player to the west", "player to the north"),
)
ACTIONS = ("rotate_ccw", "rotate_cw", "forward", "pickup", "open")
_FEATURES = {
    "has_key": "int: 1 once the key was picked up",
    "key_distance": "int: rows and columns to the key, 0 once it was picked up",
    "key_ahead": "int: 1 while the key lies in front of the player",
    "lock_distance": "int: rows and columns to the nearest locked door, 0 without any",
    "lock_ahead": "int: 1 while a locked door is in front of the player",
    "locked_doors": "int: how many doors are locked",
    "open_doors": "int: how many doors are open",
    "goal_distance": "int: rows and columns to the goal; in KeyCorridor it is the ball",
    "goal_ahead": "int: 1 while the goal is in front of the player",
    "at_goal": "int: 1 while the player stands on the goal",
    "past_door": "int: columns that the player is to the right of the last door, else 0",
}


def game(name: str, library_folder: Path) -> Game:
    """One of navix's games DoorKey and KeyCorridor; raises ConfigError for another name."""
    if name not in SHAPES:
        choices = f"choose one of {', '.join(SHAPES)}"
        raise ConfigError(f"the game {name} of navix is unknown{closest(name, SHAPES)}; {choices}")
    changes = {f"{each}_diff": f"int: the change of {each} in this timestep" for each in _FEATURES}
    return Game(
        name=name,
        observation_size=(*SHAPES[name], len(CHANNELS)),
        num_actions=len(ACTIONS),
        capacity=1,
        features=_FEATURES | changes,
        enums={},
        library_folder=library_folder,
        sources=("navix",),
        make=partial(_engine, name),
        renderer=_renderer,
    )


def _engine(name: str) -> Any:
    check_extra(name, "navix")
    from flowrl.games.adapters.navix_engine import NavixEngine

    return NavixEngine(name, ACTIONS)


def _renderer() -> Callable[[Any], Any]:
    from flowrl.games.adapters.navix_engine import draw

    return draw


DOOR_KEY = game("Navix-DoorKey-Random-8x8-v0", _LIBRARY / "navix_door_key")
KEY_CORRIDOR = game("Navix-KeyCorridorS3R3-v0", _LIBRARY / "navix_key_corridor")
