"""What other programs ask of the scheduler: files in `requests/`, read when a daemon is up."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Literal

from flowrl import durable
from flowrl.errors import FileRefusedError
from flowrl.layout import GraphLayout
from flowrl.parallel.signals import Hold, Retry

logger = logging.getLogger(__name__)
FORMAT = 1
Verb = Literal["retry", "hold"]
_EVENTS = {"retry": Retry, "hold": Hold}


def ask(layout: GraphLayout, verb: Verb, skill: str) -> Path:
    """Ask the scheduler of this graph to retry or hold a skill, now or when it starts."""
    durable.make_dir(layout.requests)
    path = layout.requests / f"{time.time_ns()}-{secrets.token_hex(4)}.json"
    durable.write_json(path, {"format": FORMAT, "ask": verb, "skill": skill})
    return path


class Inbox:
    """The requests of one graph, oldest first."""

    def __init__(self, layout: GraphLayout) -> None:
        self._folder = layout.requests
        self._taken: list[Path] = []

    @property
    def waiting(self) -> bool:
        """Whether there is a request that was not taken: one whose save failed is no news."""
        return any(path not in self._taken for path in self._paths())

    def take(self, skills: Collection[str]) -> Sequence[Retry | Hold]:
        """The requests as events; they stay on disk until `done`."""
        self._taken = self._paths()
        events = (_read(path, skills) for path in self._taken)
        return [event for event in events if event is not None]

    def done(self) -> None:
        """Remove what was taken, now that the state which follows from it is saved."""
        for path in self._taken:
            durable.remove_file(path)
        self._taken = []

    def _paths(self) -> list[Path]:
        return sorted(self._folder.glob("*.json")) if self._folder.is_dir() else []


def _read(path: Path, skills: Collection[str]) -> Retry | Hold | None:
    try:
        facts = durable.read_json(path)
        event = _EVENTS[facts["ask"]](facts["skill"])
        if facts["format"] != FORMAT or event.skill not in skills:
            raise FileRefusedError(f"{path} asks for {event.skill!r}, which is no skill here")
    except (FileRefusedError, KeyError, TypeError) as error:
        logger.warning("a request is ignored", extra={"path": str(path), "why": str(error)})
        return None
    return event
