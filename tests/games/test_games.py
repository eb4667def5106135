"""A game is found by its name, and says of itself what the game itself says."""

from __future__ import annotations

import importlib
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from flowrl.errors import ConfigError
from flowrl.games import base
from flowrl.games.base import env_sizes, find_game, game_names
from flowrl.games.craftax import CLASSIC, FULL

STATES = {
    CLASSIC.name: "craftax.craftax_classic.envs.craftax_state",
    FULL.name: "craftax.craftax.craftax_state",
}
BOTH = pytest.mark.parametrize("game", [CLASSIC, FULL], ids=lambda game: game.name)


@pytest.mark.craftax
@BOTH
def test_the_members_of_every_enum_are_the_games_own(game):
    constants = importlib.import_module(game.constants)
    more = {"ItemType", "MobType"} if game is FULL else set()
    assert set(game.enums) == {"BlockType", "Action", "Achievement"} | more
    for enum, members in game.enums.items():
        assert members == set(getattr(constants, enum).__members__)


@BOTH
@pytest.mark.parametrize("sight", [True, False])
@pytest.mark.parametrize("egocentric", [True, False])
def test_the_sizes_of_an_environment_are_its_games(game, sight, egocentric):
    looks = {"sight": sight, "egocentric": egocentric}
    assert env_sizes(game.name, **looks) == (game.observed(**looks), game.num_actions)


@pytest.mark.craftax
@BOTH
def test_the_items_are_the_fields_of_the_games_inventory(game):
    inventory = importlib.import_module(STATES[game.name]).Inventory
    assert game.items == {field.name for field in fields(inventory)}


def test_an_unknown_game_is_refused_with_those_there_are_and_how_to_add_one():
    assert find_game("Craftax-Symbolic-v1") is FULL
    for name in ("Pong", None, ["Craftax-Symbolic-v1"]):
        with pytest.raises(
            ConfigError, match=r"is unknown.*; choose one of Craftax-Classic"
        ) as refused:
            find_game(name)
        assert "add a game by an entry point in the group flowrl.games" in str(refused.value)


def test_the_games_that_come_with_flowrl_are_entry_points_of_it():
    """They are listed twice, since a source tree that is not installed has no entry points."""
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert tomllib.loads(text)["project"]["entry-points"]["flowrl.games"] == base.SHIPPED
    assert game_names()[:2] == (CLASSIC.name, FULL.name)


def test_loading_the_games_imports_no_jax():
    code = (
        "import sys\n"
        "from flowrl.games.base import known_games\n"
        "known_games()\n"
        "sys.exit(bool({'jax', 'craftax', 'numpy'} & set(sys.modules)))\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
