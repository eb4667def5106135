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
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from flowrl import storage
from flowrl.errors import FlowrlError, format_error, is_transient
from flowrl.parallel.events import MOST_FRAMES, MOST_PRIORITY, ControlRequest, Response, Verb
from flowrl.paths import GraphPaths, display_name
from flowrl.storage import records

logger = logging.getLogger(__name__)
MOST_AT_ONCE = 50
_LIMIT_BYTES = 4096
_ID = re.compile(r"[0-9]{1,20}-[0-9a-f]{8}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """The file of one request; programs other than flowrl may write it, too."""

    verb: Verb
    skill: Annotated[str, display_name] | None = None
    number: Annotated[int, records.within(-MOST_PRIORITY, MOST_FRAMES)] = 0

    def __post_init__(self) -> None:
        if self.verb is Verb.PRIORITY and self.number > MOST_PRIORITY:
            raise ValueError(f"priority {self.number} is over {MOST_PRIORITY}")


def send_request(
    graph_paths: GraphPaths, verb: Verb, skill: str | None = None, *, number: int = 0
) -> str:
    """Leave a request for the scheduler of this graph, now or when it starts; return its id."""
    storage.make_dir(graph_paths.requests)
    name = f"{time.time_ns()}-{secrets.token_hex(4)}"
    record = RequestRecord(verb=verb, skill=skill, number=number)
    records.write(graph_paths.requests / f"{name}.json", record)
    return name


class Inbox:
    """The requests of one graph, oldest first."""

    def __init__(self, graph_paths: GraphPaths) -> None:
        self._folder = graph_paths.requests
        self._taken: list[Path] = []
        self._ignored: set[str] = set()  # names that are no ids, or of files that stay

    @property
    def waiting(self) -> bool:
        """True if there is a request that was not taken yet."""
        return any(path not in self._taken for path in self._files())

    def take(self) -> Sequence[ControlRequest]:
        """Return the oldest requests, none while they cannot be read; files stay until `done`."""
        self._taken = self._files()[:MOST_AT_ONCE]
        try:
            return [_read_request(path) for path in self._taken]
        except (FlowrlError, OSError):
            self._taken = []
            return []

    def pending(self) -> Sequence[ControlRequest]:
        """Return what `take` would, and leave it to be taken."""
        before, requests = self._taken, self.take()
        self._taken = before
        return requests

    def done(self, requests: Collection[ControlRequest]) -> None:
        """Remove the files of requests, now that the state with the responses is saved."""
        ids = {request.id for request in requests}
        for path in (path for path in self._taken if path.stem in ids):
            try:
                storage.remove_file(path)
            except OSError as error:
                self._ignored.add(path.name)
                logger.warning("%s is ignored: %s", path, format_error(error))
        self._taken = [path for path in self._taken if path.stem not in ids]

    def _files(self) -> list[Path]:
        if self._folder.is_symlink() or not self._folder.is_dir():
            return []
        try:
            files = [path for path in self._folder.glob("*.json") if path.name not in self._ignored]
        except OSError as error:
            if not is_transient(error):
                raise
            return []
        for path in [path for path in files if not _ID.fullmatch(path.stem)]:
            self._ignored.add(path.name)
            name = f"{time.time_ns()}-{secrets.token_hex(4)}.json"
            logger.warning(
                "%r is ignored: no request has this name; remove it, or call it %s", str(path), name
            )
            files.remove(path)
        return sorted(files)


def log_responses(before: Collection[Response], after: Collection[Response]) -> None:
    """Log the responses that are in `after` alone."""
    for response in after:
        if response not in before:
            verb = Verb(response.verb).command if response.verb else "malformed"
            words = " ".join(filter(None, [verb, response.skill]))
            logger.info("request %s: %s", words, response.outcome)


def _read_request(path: Path) -> ControlRequest:
    """The request in a file; a malformed one has a refusal."""
    try:
        record = records.read(
            path, RequestRecord, sealed=False, limit_bytes=_LIMIT_BYTES, remedy="send it again"
        )
    except FlowrlError as error:
        if is_transient(error):
            raise
        return ControlRequest(id=path.stem, verb=None, refusal=str(error))
    return ControlRequest(id=path.stem, verb=record.verb, skill=record.skill, number=record.number)
