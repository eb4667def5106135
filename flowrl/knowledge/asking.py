"""Facts of a game, kept below a digest of all code they come from; alone: two commands ask."""

from __future__ import annotations

import hashlib
import logging
import os
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from flowrl.errors import ConfigError, FileRefusedError
from flowrl.games.base import Game, check_extra, find_game
from flowrl.knowledge.facts import Facts
from flowrl.launchers.sandbox import compile_cache
from flowrl.storage import locks, records

logger = logging.getLogger(__name__)
_OWN = ("games/*.py", "knowledge/facts.py", "knowledge/probing.py")  # that decide what is found
_WAIT_SECONDS = 600.0
_LIBRARIES = ("jax", "jaxlib", "numpy")


def facts_of(name: str) -> Facts:
    """Return the facts of a game: those that are kept, or newly probed ones, which takes a minute.

    Raises:
      ConfigError: the game is unknown, or cannot be probed.
    """
    game = find_game(name)
    if game.probes is None:
        what = f"the game {game.name} has no probes, so its facts are not known"
        raise ConfigError(f"{what}; give it some (docs/how-to.md, Let a game be probed)")
    check_extra(game.name, *game.sources)
    cache = compile_cache(None, os.environ)
    path = cache / "facts" / f"{game.name}-{_digest(game)}.json"
    # One process at a time probes a game.
    with locks.held(cache / "facts" / "locks" / path.name, timeout_seconds=_WAIT_SECONDS):
        if (kept := _kept(path)) is not None:
            return kept
        from flowrl.knowledge.probing import probed

        facts = probed(game.name, game.probes(), cache=cache)
        records.write(path, facts)
        return facts


def _kept(path: Path) -> Facts | None:
    if path.exists():
        with suppress(FileRefusedError):
            return records.read(path, Facts)
        logger.warning("%s is damaged; the game is probed again", path)
    return None


def _digest(game: Game) -> str:
    """Digest of the game's sources, of our own that probe it, and of the versions of libraries."""
    total = hashlib.sha256(game.code_digest().encode())
    for library in _LIBRARIES:
        total.update(f"{library} {version(library)}\n".encode())
    package = Path(__file__).parents[1]
    for path in sorted(path for pattern in _OWN for path in package.glob(pattern)):
        total.update(path.read_bytes())
    return total.hexdigest()[:32]
