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
from flowrl.paths import GraphPaths
from flowrl.runs import CodeApproval, expert_shapes
from flowrl.skills.graph import SkillGraph
from flowrl.skills.skill import load_library
from flowrl.skills.validation import cache
from flowrl.skills.validation.cache import ApprovalStore
from flowrl.skills.validation.dry_run import SkillCode

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
    for function in (base._entry_points, base._loaded, cache.shipped):
        function.cache_clear()


@pytest.fixture(scope="module")
def tiny_game(tmp_path_factory) -> Iterator[Game]:
    """The tiny game, found by this process and by those that it starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", installed(tmp_path_factory.mktemp("tiny")))
        for place in os.environ["PYTHONPATH"].split(os.pathsep)[:2]:
            patch.syspath_prepend(place)
        forget_games()
        yield find_game("Tiny-v1")
    forget_games()


def graph_of(graph_paths: GraphPaths, skill: str, game: str) -> SkillGraph:
    """A game's own skill alone, approved untried in a graph's folder."""
    found = load_library(game)[skill]
    approval = CodeApproval(digest=SkillCode.of(found, game).digest)
    ApprovalStore(graph_paths.approvals).keep(approval)
    return SkillGraph([found])


def shapes_in(game: Game, layer_size: int) -> dict[str, tuple[int, ...]]:
    """The shapes of an expert for a game."""
    return expert_shapes(game.observed(sight=True, egocentric=True), game.num_actions, layer_size)
