"""The tiny game, installed as a package of its own is: by a distribution on the Python path."""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowrl.games import base
from flowrl.games.base import Game, find_game

HERE = Path(__file__).parent / "tiny"


def installed(folder: Path, here: Path = HERE) -> str:
    """PYTHONPATH with a game's package, by default the tiny one's, installed in this folder."""
    package = folder / "site" / "tiny_game-1.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-game\nVersion: 1.0\n")
    project = tomllib.loads((here / "pyproject.toml").read_text())["project"]
    [(name, place)] = project["entry-points"]["flowrl.games"].items()
    (package / "entry_points.txt").write_text(f"[flowrl.games]\n{name} = {place}\n")
    paths = [str(package.parent), str(here), os.environ.get("PYTHONPATH", "")]
    return os.pathsep.join(paths).rstrip(os.pathsep)


def forget_games() -> None:
    """Let this process look for installed games again."""
    for name in ("tiny_game", "tiny_engine"):
        sys.modules.pop(name, None)
    for function in (base._entry_points, base._loaded):
        function.cache_clear()


@pytest.fixture
def tiny_game(tmp_path, monkeypatch) -> Iterator[Game]:
    """The tiny game, found by this process and by those that it starts."""
    monkeypatch.setenv("PYTHONPATH", installed(tmp_path))
    for place in os.environ["PYTHONPATH"].split(os.pathsep)[:2]:
        monkeypatch.syspath_prepend(place)
    forget_games()
    yield find_game("Tiny-v1")
    forget_games()
