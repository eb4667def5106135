"""The facts of both games, probed once and kept in the user's cache."""

from __future__ import annotations

import pytest

from flowrl.games.craftax import CLASSIC, FULL
from flowrl.knowledge.asking import facts_of


@pytest.fixture(scope="session", params=[CLASSIC, FULL], ids=lambda game: game.name)
def game(request):
    return request.param


@pytest.fixture(scope="session")
def facts(game):
    return facts_of(game.name)
