"""What other programs ask of the scheduler: files in `requests/`, read when a daemon is up.

A request's id is its file's stem. The state remembers the ids it has answered, so a file that is
still there after a crash is not obeyed twice. Whoever may write into the folder may ask; a file
that is no request is answered with why not, and does nothing.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from flowrl import storage
from flowrl.errors import FileRefusedError, FlowrlError, format_error, is_transient
from flowrl.parallel.asks import MOST_PRIORITY, Answer, Request, Verb
from flowrl.paths import GraphPaths, display_name

logger = logging.getLogger(__name__)
FORMAT = 2
MOST_AT_ONCE = 50
_LIMIT_BYTES = 4096
_ID = re.compile(r"[0-9]{1,20}-[0-9a-f]{8}")
_OLD_WORDS = {"hold": Verb.PAUSE}  # of format 1


def ask(layout: GraphPaths, verb: Verb, skill: str | None = None, *, number: int = 0) -> str:
    """Ask the scheduler of this graph, which hears it now or when it starts; answers the id."""
    storage.make_dir(layout.requests)
    name = f"{time.time_ns()}-{secrets.token_hex(4)}"
    facts = {"format": FORMAT, "ask": verb.value, "skill": skill, "number": number}
    storage.write_json(layout.requests / f"{name}.json", facts)
    return name


class Inbox:
    """The requests of one graph, oldest first."""

    def __init__(self, layout: GraphPaths) -> None:
        self._folder = layout.requests
        self._taken: list[Path] = []
        self._ignored: set[str] = set()  # names of what is no request, or cannot be removed

    @property
    def waiting(self) -> bool:
        """Whether there is a request that was not taken: one whose save failed is no news."""
        try:
            return any(path not in self._taken for path in self._paths())
        except OSError as error:
            if not is_transient(error):
                raise
            return False

    def take(self) -> Sequence[Request]:
        """The oldest requests as events; they stay on disk until `done`.

        None are taken while the machine cannot look, for instance for lack of file descriptors.
        """
        try:
            self._taken = self._paths()[:MOST_AT_ONCE]
            return [_request(path) for path in self._taken]
        except (FlowrlError, OSError) as error:
            if not is_transient(error):
                raise
            self._taken = []
            return []

    def done(self) -> None:
        """Remove what was taken, now that the state which follows from it is saved."""
        for path in self._taken:
            try:
                storage.remove_file(path)
            except OSError as error:
                self._ignore(path, format_error(error))
        self._taken = []

    def _paths(self) -> list[Path]:
        if self._folder.is_symlink() or not self._folder.is_dir():
            return []
        found = sorted(p for p in self._folder.glob("*.json") if p.name not in self._ignored)
        for path in found:
            if not _ID.fullmatch(path.stem):
                self._ignore(path, "its name is not that of a request")
        return [path for path in found if path.name not in self._ignored]

    def _ignore(self, path: Path, why: str) -> None:
        self._ignored.add(path.name)
        logger.warning("%s is ignored: %s", path, why)


def log_answers(before: Collection[Answer], after: Collection[Answer]) -> None:
    """Say what has been answered meanwhile."""
    known = {answer.id for answer in before}
    for answer in after:
        if answer.id not in known:
            of = f" {answer.skill}" if answer.skill else ""
            logger.info("asked to %s%s: %s", answer.verb or "do something", of, answer.outcome)


def _request(path: Path) -> Request:
    """What the file asks; one that asks nothing says why."""
    try:
        facts = storage.read_json(path, limit_bytes=_LIMIT_BYTES)
        return _understood(path.stem, facts)
    except FlowrlError as error:
        if is_transient(error):
            raise
        return Request(id=path.stem, verb=None, refusal=str(error))


def _understood(name: str, facts: Mapping[str, Any]) -> Request:
    word, skill, number = facts.get("ask"), facts.get("skill"), facts.get("number", 0)
    verb = _verb(word)
    if facts.get("format") not in (1, FORMAT):
        raise FileRefusedError(f"a request has format {facts.get('format')!r}; ask anew")
    if skill is not None and (not isinstance(skill, str) or display_name(skill) != skill):
        raise FileRefusedError(f"{skill!r:.80} is no skill's name")
    if type(number) is not int or abs(number) > MOST_PRIORITY:
        raise FileRefusedError(f"{number!r:.80} is not a number up to {MOST_PRIORITY}")
    return Request(id=name, verb=verb, skill=skill, number=number)


def _verb(word: object) -> Verb:
    known = {**_OLD_WORDS, **{verb.value: verb for verb in Verb}}
    if not isinstance(word, str) or word not in known:
        raise FileRefusedError(f"nobody can be asked to {word!r:.80}")
    return known[word]
