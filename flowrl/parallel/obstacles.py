"""What no repair may go past: repairing on would take for lost what is only elsewhere or newer.

Folders that were moved away behind a link, locks that are no files, and whatever a newer flowrl
has written. Each is for a person to put right; until then nothing in the graph is changed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path

from flowrl.errors import FileRefusedError, FormatVersionError
from flowrl.experts import manifest as manifests
from flowrl.experts import rooms
from flowrl.experts.manifest import Manifest
from flowrl.experts.store import ExpertStore
from flowrl.parallel.run_folder import is_run_folder, live_runs
from flowrl.parallel.skill_sources import read_skill_file
from flowrl.parallel.state_file import StateFile
from flowrl.paths import GraphPaths, RunPaths
from flowrl.runs import read_result, read_run
from flowrl.storage import locks, records

Obstacle = tuple[Path, FileRefusedError]


def refuse_obstacles(layout: GraphPaths) -> None:
    """Make sure that a graph can be repaired.

    Raises:
      FileRefusedError: a folder or a lock is none, or is a link; says how to go on.
      FormatVersionError: a newer flowrl wrote one of the files.
    """
    for _, error in obstacles(layout):
        raise error


def obstacles(layout: GraphPaths) -> Iterator[Obstacle]:
    """Everything that keeps a graph from being repaired: where it is, and a refusal."""
    misplaced = list(chain(rooms.misplaced(layout), _odd_locks(layout)))
    if not misplaced:  # else reading could lead out of the graph
        misplaced = list(rooms.moved(chain(_linked_experts(layout), _linked_runs(layout))))
    yield from misplaced or _newer(layout)


def _odd_locks(layout: GraphPaths) -> Iterator[Obstacle]:
    for path in (layout.daemon_lock, layout.global_lock):
        try:
            locks.check_plain(path)
        except FileRefusedError as error:
            yield path, error


def _linked_experts(layout: GraphPaths) -> Iterator[Path]:
    """The links in the places of experts that the manifest or its history names."""
    places = {place for known in _manifests(layout) for place in _places(layout, known)}
    return (place for place in sorted(places) if place.is_symlink())


def _places(layout: GraphPaths, known: Manifest) -> Iterator[Path]:
    for version in known.experts.values():
        yield layout.skill_folder(version.index, version.skill)
        yield layout.expert_folder(version.index, version.skill)
        yield ExpertStore(layout).path_of(version)


def _linked_runs(layout: GraphPaths) -> Iterator[Path]:
    if layout.training_runs.is_dir():
        for path in sorted(layout.training_runs.iterdir()):
            if is_run_folder(path.name) and path.is_symlink():
                yield path


def _manifests(layout: GraphPaths) -> Iterator[Manifest]:
    for path in _manifest_files(layout):
        try:
            yield manifests.read_file(path)
        except FileRefusedError:
            continue


def _manifest_files(layout: GraphPaths) -> Iterator[Path]:
    yield layout.manifest
    for generation in manifests.generations(layout):
        yield manifests.history_file(layout, generation)


def _newer(layout: GraphPaths) -> Iterator[Obstacle]:
    """A refusal for every file of another format; what is damaged is not told of here."""
    for path, read in _readers(layout):
        if os.path.lexists(path):
            try:
                read()
            except FormatVersionError as error:
                yield path, error
            except FileRefusedError:
                continue


def _readers(layout: GraphPaths) -> Iterator[tuple[Path, Callable[[], object]]]:
    for path in _manifest_files(layout):
        yield path, partial(manifests.read_file, path)
    yield layout.scheduler_state, StateFile(layout.scheduler_state).load
    yield (
        layout.config_json,
        partial(records.read_document, layout.config_json),
    )
    for path in sorted(layout.skill_files.glob("*.json")):
        yield path, partial(read_skill_file, path)
    archives = (RunPaths(path, 0) for path in sorted(layout.skills.glob("*_*")))
    for place in (*archives, *live_runs(layout)):
        yield place.run_json, partial(read_run, place)
        yield place.result_json, partial(read_result, place)
