"""Users' requests to a scheduler: files in `requests/`, read by the daemon.

A request's id is its file's stem. The state keeps the ids that have a response, so a file that is
still there after a crash is not carried out twice. Anyone who may write into the folder may send
requests; a malformed file is refused in its response and changes nothing.
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
from flowrl.parallel.events import MOST_PRIORITY, ControlRequest, Response, Verb
from flowrl.paths import GraphPaths, display_name

logger = logging.getLogger(__name__)
FORMAT = 1
MOST_AT_ONCE = 50
_LIMIT_BYTES = 4096
_ID = re.compile(r"[0-9]{1,20}-[0-9a-f]{8}")


def send_request(
    paths: GraphPaths, verb: Verb, skill: str | None = None, *, number: int = 0
) -> str:
    """Leave a request for the scheduler of this graph, now or when it starts; return its id."""
    storage.make_dir(paths.requests)
    name = f"{time.time_ns()}-{secrets.token_hex(4)}"
    data = {"format": FORMAT, "verb": verb.value, "skill": skill, "number": number}
    storage.write_json(paths.requests / f"{name}.json", data)
    return name


class Inbox:
    """The requests of one graph, oldest first."""

    def __init__(self, paths: GraphPaths) -> None:
        self._folder = paths.requests
        self._taken: list[Path] = []
        self._ignored: set[str] = set()  # names of files that are no requests or cannot be removed

    @property
    def waiting(self) -> bool:
        """Whether there is a request that was not taken yet."""
        try:
            return any(path not in self._taken for path in self._files())
        except OSError as error:
            if not is_transient(error):
                raise
            return False

    def take(self) -> Sequence[ControlRequest]:
        """Return the oldest requests; their files stay until `done`.

        None are taken while the machine cannot read them, for instance for lack of descriptors.
        """
        try:
            self._taken = self._files()[:MOST_AT_ONCE]
            return [_read_request(path) for path in self._taken]
        except (FlowrlError, OSError) as error:
            if not is_transient(error):
                raise
            self._taken = []
            return []

    def done(self) -> None:
        """Remove the files of what was taken, now that the state with the responses is saved."""
        for path in self._taken:
            try:
                storage.remove_file(path)
            except OSError as error:
                self._ignore(path, format_error(error))
        self._taken = []

    def _files(self) -> list[Path]:
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


def log_responses(before: Collection[Response], after: Collection[Response]) -> None:
    """Log the responses that are in `after` alone."""
    known = {response.id for response in before}
    for response in after:
        if response.id not in known:
            skill = f" {response.skill}" if response.skill else ""
            verb = response.verb or "malformed"
            logger.info("request %s%s: %s", verb, skill, response.outcome)


def _read_request(path: Path) -> ControlRequest:
    """The request in a file; a malformed one has a refusal."""
    try:
        return _parse(path.stem, storage.read_json(path, limit_bytes=_LIMIT_BYTES))
    except FlowrlError as error:
        if is_transient(error):
            raise
        return ControlRequest(id=path.stem, verb=None, refusal=str(error))


def _parse(name: str, data: Mapping[str, Any]) -> ControlRequest:
    verb, skill, number = data.get("verb"), data.get("skill"), data.get("number", 0)
    if data.get("format") != FORMAT:
        raise FileRefusedError(f"a request has format {data.get('format')!r}; send it again")
    if not isinstance(verb, str) or verb not in set(Verb):
        raise FileRefusedError(
            f"unknown request {verb!r:.80}; use pause, resume, retry, cancel, priority or stop"
        )
    if skill is not None and (not isinstance(skill, str) or display_name(skill) != skill):
        raise FileRefusedError(f"{skill!r:.80} is not a skill's name")
    if type(number) is not int or abs(number) > MOST_PRIORITY:
        raise FileRefusedError(f"{number!r:.80} is not a number up to {MOST_PRIORITY}")
    return ControlRequest(id=name, verb=Verb(verb), skill=skill, number=number)
