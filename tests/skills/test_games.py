"""The tables of the games say what the games say."""

from __future__ import annotations

import importlib
from dataclasses import fields

import pytest

from flowrl.errors import ConfigError
from flowrl.skills.games import ENUMS, GAMES, table_of

STATES = {
    "craftax.craftax_classic": "craftax.craftax_classic.envs.craftax_state",
    "craftax.craftax": "craftax.craftax.craftax_state",
}


@pytest.mark.craftax
@pytest.mark.parametrize("env_name", GAMES)
@pytest.mark.parametrize("enum", sorted(ENUMS))
def test_the_members_of_every_enum_are_the_games_own(env_name, enum):
    game = GAMES[env_name]
    constants = importlib.import_module(f"{game.package}.constants")
    assert game.members[enum] == set(getattr(constants, enum).__members__)


@pytest.mark.craftax
@pytest.mark.parametrize("env_name", GAMES)
def test_the_items_are_the_fields_of_the_games_inventory(env_name):
    game = GAMES[env_name]
    inventory = importlib.import_module(STATES[game.package]).Inventory
    assert game.items == {field.name for field in fields(inventory)}


def test_an_unknown_environment_is_refused_with_those_there_are():
    assert table_of("Craftax-Symbolic-v1").capacity == 99
    for name in ("Pong", None, ["Craftax-Symbolic-v1"]):
        with pytest.raises(ConfigError, match="unknown; choose one of Craftax-Classic"):
            table_of(name)
