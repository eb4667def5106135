"""Try the libraries of games and keep their approvals: `python scripts/write_approvals.py [GAME…]`.

Without names it does so for the games that come with flowrl. Run it after a change of a library, of
the checks or of JAX's version; a test says when.
"""

from __future__ import annotations

import argparse
import sys

from flowrl import storage
from flowrl.games.adapters.navix import DOOR_KEY, KEY_CORRIDOR
from flowrl.games.base import Game, find_game
from flowrl.games.craftax import CLASSIC, FULL
from flowrl.skills.skill import load_library
from flowrl.skills.validation.cache import LibraryApprovals
from flowrl.skills.validation.dry_run import SkillCode, try_codes
from flowrl.storage import records


def write_approvals(game: Game) -> str | None:
    """Why a skill of the library is refused; None once the file is written."""
    codes = [SkillCode.of(skill, game.name) for skill in load_library(game.name).values()]
    approvals = []
    for outcome in try_codes(codes):
        if isinstance(outcome, str):
            return outcome
        approvals.append(outcome)
    record = LibraryApprovals(approvals=tuple(approvals))
    path = game.library_folder / "approvals.json"
    storage.write_atomic(path, records.encode(record))
    path.chmod(0o644)  # it is packaged
    print(f"{path}: {len(approvals)} approvals")
    return None


def main(names: list[str]) -> int:
    games = [*map(find_game, names)] or (CLASSIC, FULL, DOOR_KEY, KEY_CORRIDOR)
    refused = [why for game in games if (why := write_approvals(game)) is not None]
    print("\n".join(refused), end="")
    return 1 if refused else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("games", nargs="*", metavar="GAME", help="the name of an installed game")
    sys.exit(main(parser.parse_args().games))
