"""The manifest: the one file that says which version of each expert counts.

`global_latest.json` is replaced atomically by every merge. The same file holds the ledger of
merged runs, so a reader sees all of a merge or none of it, and a repeated merge finds its run id.
A damaged manifest is refused with the remedy; it is never begun anew.
"""

from __future__ import annotations

import functools
import os
import pickle
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from flowrl import storage
from flowrl.errors import (
    FileRefusedError,
    FormatVersionError,
    GraphDamagedError,
    GraphFormatError,
    without_remedy,
)
from flowrl.paths import GraphPaths
from flowrl.runs import ExpertVersion
from flowrl.storage import records
from flowrl.storage.records import Natural, Word

KEPT_GENERATIONS = 20  # at least; up to twice as many are there before old ones are collected
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_VERSION = re.compile(r"v(?:[0-9]{6}|[1-9][0-9]{6,})-[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_HISTORY = re.compile(r"(?:0|[1-9][0-9]*)\.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The experts that count, by global index, and the runs that are in."""

    generation: int = 0
    experts: Mapping[int, ExpertVersion] = field(default_factory=dict)
    merged: tuple[str, ...] = ()

    @property
    def versions(self) -> frozenset[tuple[int, str]]:
        """The (index, version) of every expert that counts."""
        return frozenset((item.index, item.version) for item in self.experts.values())

    def after(self, run_id: str, new: Mapping[int, ExpertVersion]) -> Manifest:
        """Return the manifest after the merge of `run_id`: its new versions and ledger entry."""
        return Manifest(
            generation=self.generation + 1,
            experts=dict(sorted({**self.experts, **new}.items())),
            merged=(*self.merged, run_id),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestFile:
    """A manifest as its file has it: the experts in the order of their indices."""

    generation: Natural
    experts: tuple[ExpertVersion, ...]
    merged: tuple[Word, ...]

    def __post_init__(self) -> None:
        for version in self.experts:
            if not is_version_name(version.version):
                raise ValueError(f"{version.version!r} is not the name of a version")
        if len({version.index for version in self.experts}) != len(self.experts):
            raise ValueError("an expert is listed twice")


def version_name(generation: int, run_id: str) -> str:
    """Return the folder name of a version that a run made.

    >>> version_name(7, "e4.a1.0f")
    'v000007-e4.a1.0f'
    """
    return f"v{generation:06d}-{run_id}"


def generation_of(version: str) -> int:
    """Return the generation in a version's folder name.

    >>> generation_of("v000007-e4.a1.0f")
    7
    """
    return int(version[1:].partition("-")[0])


def is_version_name(text: str) -> bool:
    """Return whether a folder name is one that `version_name` makes."""
    return _VERSION.fullmatch(text) is not None


def checked_run_id(text: str) -> str:
    """Return the run id, once it can be a part of a file name; else raise FileRefusedError."""
    if _RUN_ID.fullmatch(text) is None:
        raise FileRefusedError(f"{text!r} is no run id; use letters, digits, '.', '_' and '-'")
    return text


def read(graph_paths: GraphPaths) -> Manifest:
    """The manifest on disk; an empty one for a graph that has merged nothing yet.

    GraphDamagedError: it is damaged, lost while its history is there, an older copy, or of another
    version.
    """
    past = generations(graph_paths)  # looked at first: a first merge writes it after the manifest
    if not os.path.lexists(graph_paths.manifest):
        if past or any(graph_paths.skills.glob("*/run.json")):  # an archive comes after a manifest
            raise GraphDamagedError(f"{graph_paths.manifest} is lost; {_remedy(graph_paths)}")
        return Manifest()
    path = graph_paths.manifest
    try:
        present = storage.read_parsed(path, functools.partial(_parsed, path))
    except FormatVersionError as error:
        raise GraphFormatError(str(error)) from error
    except FileRefusedError as error:
        told = f"{without_remedy(error)}; {_remedy(graph_paths)}"
        told = str(error) if isinstance(error.__cause__, PermissionError) else told
        raise GraphDamagedError(told) from error
    if past and past[-1] > present.generation + 1:
        _refuse_older(graph_paths, present.generation)
    return present


def _remedy(graph_paths: GraphPaths) -> str:
    """Return what a user can do about a damaged manifest."""
    if any(known for _, known in read_history(graph_paths)):
        repair = graph_paths.command("fsck", "--repair")
        return f"stop the scheduler and run {repair}, which restores it from its history"
    return f"restore {graph_paths.checkpoints} from a backup, or train in a new folder"


def _refuse_older(graph_paths: GraphPaths, generation: int) -> None:
    """Raise GraphDamagedError if a later generation than this one has counted.

    Each is written to the history before it counts, so the next one may only have been prepared.
    """
    newest = max((number for number, known in read_history(graph_paths) if known), default=0)
    if newest > generation + 1:
        raise GraphDamagedError(
            f"{graph_paths.manifest} is an older copy: it is generation {generation}, and its "
            f"history has generation {newest}; {_remedy(graph_paths)}"
        )


@functools.lru_cache(maxsize=2)  # a merge asks eight times, and parsing a large one takes seconds
def _parsed(path: Path, content: bytes) -> Manifest:
    return read_file(path, content=content)


def read_file(path: Path, *, content: bytes | None = None) -> Manifest:
    """Read one manifest file, the present one or one of the history."""
    record = records.read(path, ManifestFile, content=content)
    experts = {version.index: version for version in record.experts}
    return Manifest(generation=record.generation, experts=experts, merged=record.merged)


def history_file(graph_paths: GraphPaths, generation: int) -> Path:
    """Return the file of a generation's manifest."""
    return graph_paths.history / f"{generation}.json"


def generations(graph_paths: GraphPaths) -> tuple[int, ...]:
    """The generations in the history, oldest first."""
    if not graph_paths.history.is_dir():
        return ()
    names = [path.name for path in graph_paths.history.iterdir() if _HISTORY.fullmatch(path.name)]
    return tuple(sorted(int(name.removesuffix(".json")) for name in names))


def read_history(graph_paths: GraphPaths) -> Iterator[tuple[int, Manifest | None]]:
    """Every generation of the history, oldest first; None for one that cannot be read."""
    for generation in generations(graph_paths):
        path = history_file(graph_paths, generation)
        try:
            known = read_file(path)
        except FileRefusedError:
            if os.path.lexists(path):  # else it was collected meanwhile
                yield generation, None
            continue
        yield generation, known if known.generation == generation else None


def write_history(graph_paths: GraphPaths, manifest: Manifest) -> None:
    """Keep a manifest for rollback; called before the manifest itself is swapped in."""
    storage.make_dir(graph_paths.history)
    path, content = history_file(graph_paths, manifest.generation), _content(manifest)
    with suppress(FileRefusedError):
        if storage.read_bytes(path) == content:
            return  # its time tells people when the generation was made
    storage.write_atomic(path, content)


def swap(graph_paths: GraphPaths, manifest: Manifest) -> None:
    """Make `manifest` the one that counts: the commit of a merge."""
    storage.make_dir(graph_paths.checkpoints)
    storage.write_atomic(graph_paths.manifest, _content(manifest))


def write_pickle(graph_paths: GraphPaths, manifest: Manifest) -> None:
    """Write the same facts under the documented name, for other tools; flowrl never reads it."""
    facts = {"format": 1, **records.to_json(_file(manifest))}
    facts["experts"] = {item["index"]: item for item in facts["experts"]}
    # Not durable: the next start writes it again.
    storage.write_atomic(
        graph_paths.manifest_pickle, pickle.dumps(facts, protocol=4), durable=False
    )


def _file(manifest: Manifest) -> ManifestFile:
    experts = tuple(manifest.experts[index] for index in sorted(manifest.experts))
    return ManifestFile(generation=manifest.generation, experts=experts, merged=manifest.merged)


def _content(manifest: Manifest) -> bytes:
    return records.encode(_file(manifest))
