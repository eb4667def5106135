"""Changes of a graph, found by the times of its files while somebody watches."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from flowrl.errors import FlowrlError, format_error
from flowrl.parallel.health import daemon_of
from flowrl.paths import GraphPaths, graph_or_sweep
from flowrl.reports.status import status_document
from flowrl.viewing.layout import graph_of, places

POLL_SECONDS = 0.25
_SETTLE_SECONDS = 0.3  # of a change until it is read: its hand-over comes first
_MOST_POLL_SECONDS = 0.4
_REST = 4  # times as long as a look took nothing is read, so that a large graph costs little
_BEAT_SECONDS = 5.0  # between figures of running skills: to paint them takes time from trainers
_COLUMN, _ROW = 220, 56  # pixels between neighbours of the picture
Document = Mapping[str, Any]


class _Stamp(NamedTuple):
    """Facts of a graph; one of them differs once it has changed."""

    beat: int
    daemon: dict[str, Any] | None
    files: tuple[tuple[int, int, int] | None, ...]
    """Of each file the time in ns of its last change, its inode and its size; None without it."""


class GraphWatch:
    """The newest document of one graph; its files are read only when they have changed.

    A graph that has vanished, or cannot be read, keeps its last document with a `problem`.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._lock = asyncio.Lock()
        self._due = 0.0
        self._stamp: _Stamp | None = None
        self._document: Document = {"graph": str(root), "skills": [], "problem": ""}
        self._places: tuple[Any, dict[str, tuple[int, float]]] = (None, {})

    async def newest(self) -> Document:
        """Return the document; the same object as before if nothing has changed."""
        async with self._lock:
            if time.monotonic() >= self._due:
                await asyncio.to_thread(self._look)
        return self._document

    def _look(self) -> None:
        began = time.monotonic()
        try:
            graph_paths = graph_or_sweep(self.root)
            stamp = self._stamp_of(graph_paths)
            if stamp != self._stamp and (self._stamp is None or _has_settled(stamp)):
                self._document = {**self._read(graph_paths), "problem": ""}
                self._stamp = stamp
        except (FlowrlError, OSError) as error:
            self._stamp, problem = None, format_error(error)
            if self._document["problem"] != problem:
                self._document = {**self._document, "problem": problem}
        now = time.monotonic()
        rest = min(max(POLL_SECONDS, _REST * (now - began)), _MOST_POLL_SECONDS)
        self._due = now + rest - POLL_SECONDS / 10  # streams wake by themselves

    def _stamp_of(self, graph_paths: GraphPaths) -> _Stamp:
        """The times of files and the scheduler: one of them differs once a graph has changed."""
        skills = self._document["skills"]
        running = [row for row in skills if row["status"] == "running"]
        runs = [graph_paths.run(row["expert"], row["skill"]) for row in running]
        files = [graph_paths.scheduler_state, graph_paths.manifest, graph_paths.notices]
        files += [graph_paths.judging]
        files += [path for run in runs for path in (run.start_json, run.exit_json)]
        beat = int(time.monotonic() / _BEAT_SECONDS) if running else 0  # progress.json changes, too
        return _Stamp(beat, daemon_of(graph_paths.daemon_lock), tuple(map(_time_of, files)))

    def _read(self, graph_paths: GraphPaths) -> dict[str, Any]:
        document = status_document(graph_paths)
        needs = {row["skill"]: row["needs"] for row in document["skills"]}
        if self._places[0] != needs:
            self._places = (needs, places(graph_of(needs)))
        for row in document["skills"]:
            column, place = self._places[1][row["skill"]]
            row["x"], row["y"] = column * _COLUMN, place * _ROW
        return document


def changes(old: Document | None, new: Document) -> dict[str, Any]:
    """Return what turns `old` into `new`: all of it, marked `whole`, or rows and keys that differ.

    >>> row = {"skill": "A", "needs": [], "status": "waiting"}
    >>> changes({"ended": False, "skills": [row]}, {"ended": True, "skills": [row]})
    {'ended': True, 'skills': []}
    """
    if old is None or _names(old) != _names(new) or old.keys() != new.keys():
        return {"whole": True, **new}
    rows = [row for was, row in zip(old["skills"], new["skills"], strict=True) if was != row]
    others = {key: value for key, value in new.items() if old[key] != value}
    return {**others, "skills": rows}


def _names(document: Document) -> list[tuple[Any, Any]]:
    return [(row["skill"], row["needs"]) for row in document["skills"]]


def _has_settled(stamp: _Stamp) -> bool:
    """Return whether the newest change is _SETTLE_SECONDS old, or a clock says it is to come."""
    newest = max((file[0] for file in stamp.files if file), default=0)
    return not 0 <= time.time_ns() - newest < 1e9 * _SETTLE_SECONDS


def _time_of(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size
