"""Remedies for an expert that differs from the manifest: fall back, do without, or go back.

Damaged files are moved to `quarantine/`, to the same place below it, with the reason beside them.
Nothing there is used again. Going back never rewrites the past: it swaps in a new generation with
the experts of an old one. The ledger stays whole, so a run that was rolled back is not merged again
by a late process.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
from collections.abc import Mapping
from pathlib import Path

from flowrl import notices, storage
from flowrl.errors import (
    ConfigError,
    ExpertError,
    FileRefusedError,
    FormatVersionError,
    without_remedy,
)
from flowrl.experts import manifest as manifests
from flowrl.experts.manifest import Manifest
from flowrl.experts.store import ExpertStore, refuse_links
from flowrl.paths import GraphPaths
from flowrl.runs import ExpertVersion

logger = logging.getLogger(__name__)
NOTICE = "damage_expert_"  # and the expert's index


def usable(store: ExpertStore, version: ExpertVersion) -> ExpertVersion:
    """Return the version if it is whole; else the newest earlier whole one, which counts now.

    Damage is logged as an error and shown by `flowrl status` until `flowrl fsck --repair` has run.
    Without a whole version, ExpertMissingError or ExpertCorruptError says so.
    """
    try:
        store.verify(version)
    except ExpertError as error:
        problem = error
    else:
        return version
    repair = store.graph_paths.command("fsck", "--repair")
    fallback = fall_back(store, version, str(problem))
    if fallback is None:
        text = (
            f"{without_remedy(problem)}; no earlier version is whole: restore the files from a "
            f"backup, or stop the scheduler and run {repair}, which lets the skill train again"
        )
    else:
        text = (
            f"expert {version.index} ({version.skill}) was damaged: version {version.version} "
            f"({version.frames:,} frames) is in {store.graph_paths.quarantine}, version "
            f"{fallback.version} ({fallback.frames:,} frames) counts again. Seen? Then "
            f"{repair} withdraws this notice"
        )
    logger.error("%s", text)
    notices.publish(store.graph_paths, f"{NOTICE}{version.index}", text)
    if fallback is None:
        raise type(problem)(text) from problem
    return fallback


def whole_generation(store: ExpertStore, generation: int) -> Mapping[int, ExpertVersion]:
    """Return the experts of an earlier generation.

    ConfigError: there is no such generation. ExpertError: one of its versions is not whole.
    """
    history = {
        number: known for number, known in manifests.read_history(store.graph_paths) if known
    }
    if generation not in history:
        now = store.manifest().generation
        others = ", ".join(str(number) for number in history if number != now)
        choose = f"choose among {others}" if others else "the next merge writes one"
        raise ConfigError(
            f"{store.graph_paths.history} holds no whole generation {generation}; {choose}"
        )
    experts = history[generation].experts
    for version in experts.values():
        store.verify(version)
    return experts


def rollback(store: ExpertStore, generation: int) -> Manifest:
    """Make an earlier generation's experts count again, as a new one; see `whole_generation`."""
    experts = whole_generation(store, generation)
    amended = store.amend(lambda before: _with_experts(before, experts))
    logger.warning("rolled back to generation %d", generation)
    return amended


def restore_manifest(graph_paths: GraphPaths) -> str:
    """Replace a damaged manifest by the newest generation of its history, and say so.

    A generation is written to the history before it counts, so the newest one is either what the
    manifest said or a merge that was about to count. If it cannot be read, an older one is taken
    only if no version on disk was made by a later merge. Returns "" if the manifest is whole.

    FileRefusedError means that no generation can be read, or a merge would be lost; it says which.
    FormatVersionError means that another version of flowrl wrote the manifest.
    """
    store = ExpertStore(graph_paths)
    try:
        store.manifest()
    except FormatVersionError:
        raise
    except FileRefusedError as error:
        problem = str(error)
    else:
        return ""
    readable = [known for _, known in manifests.read_history(graph_paths) if known is not None]
    if not readable:
        raise FileRefusedError(
            f"{graph_paths.manifest} is damaged, and no generation in {graph_paths.history} can be "
            f"read; restore {graph_paths.checkpoints} from a backup"
        )
    newest = readable[-1]
    made = ((manifests.generation_of(name), path) for (_, name), path in store.versions())
    if later := [str(path) for generation, path in made if generation > newest.generation]:
        path = manifests.history_file(graph_paths, newest.generation)
        raise FileRefusedError(
            f"{graph_paths.manifest} is damaged, and so is the newest of its history. Generation "
            f"{newest.generation} can be read, but these later versions would be lost: "
            f"{', '.join(later)}. Restore {graph_paths.checkpoints} from a backup, or lose them: "
            f"cp {path} {graph_paths.manifest}"
        )
    with store.locked():
        set_aside(graph_paths, graph_paths.manifest, problem, copy=True)
        manifests.swap(graph_paths, newest)
    return f"the manifest is generation {newest.generation} of its history again"


def fall_back(store: ExpertStore, broken: ExpertVersion, why: str) -> ExpertVersion | None:
    """Make the newest earlier whole version of an expert count again, and return it.

    The broken one goes to quarantine. Returns None, and changes nothing, if no earlier one is
    whole; FileRefusedError, too, changes nothing: a folder of the graph is not where it belongs.
    """
    whole = _whole_before(store, broken)
    if whole is not None:
        _exchange(store, broken, {broken.index: whole}, why)
    return whole


def _whole_before(store: ExpertStore, broken: ExpertVersion) -> ExpertVersion | None:
    """The newest whole version of an expert before the broken one."""
    newest = manifests.generation_of(broken.version)
    earlier = {
        number: version
        for version in spares(store)
        if (version.index, version.skill) == (broken.index, broken.skill)
        and (number := manifests.generation_of(version.version)) < newest
    }
    whole = (earlier[n] for n in sorted(earlier, reverse=True) if not damage(store, earlier[n]))
    return next(whole, None)


def refuse_lost(store: ExpertStore) -> None:
    """Raise ExpertError for a merged expert of which no version is whole; changes nothing."""
    for version in store.manifest().experts.values():
        try:
            store.verify(version)
        except ExpertError:
            if _whole_before(store, version) is None:
                raise


def drop(store: ExpertStore, broken: ExpertVersion, why: str) -> None:
    """Take an expert without a whole version out of the manifest; raises as `fall_back` does."""
    _exchange(store, broken, {}, why)


def damage(store: ExpertStore, version: ExpertVersion) -> str:
    """The reason why a version cannot be used; "" if it is whole."""
    try:
        store.verify(version)
    except ExpertError as error:
        return without_remedy(error)
    return ""


def spares(store: ExpertStore) -> list[ExpertVersion]:
    """The versions that only the history names: those that can be fallen back on."""
    named = {
        (version.index, version.version): version
        for _, known in manifests.read_history(store.graph_paths)
        if known is not None
        for version in known.experts.values()
    }
    return [named[key] for key in named.keys() - store.manifest().versions]


def set_aside(graph_paths: GraphPaths, path: Path, why: str, *, copy: bool = False) -> Path:
    """Move a damaged file or folder, if it is there, to quarantine, with the reason.

    A file that is replaced next is copied, so that it is never missing. FileRefusedError changes
    nothing: a link or a file is in the place of a folder.
    """
    first = place = _quarantine_place(graph_paths, path)
    if not os.path.lexists(path):
        return place
    for number in itertools.count(1):
        if not os.path.lexists(place):
            break
        place = first.with_name(f"{first.name}.{number}")
    storage.write_atomic(place.with_name(f"{place.name}.why.txt"), why.rstrip() + "\n")
    if copy and path.is_file() and not path.is_symlink():
        storage.copy_file(path, place)
    else:
        storage.move_dir(path, place)
    return place


def _exchange(
    store: ExpertStore, broken: ExpertVersion, by: Mapping[int, ExpertVersion], why: str
) -> None:
    """Quarantine the broken version of an expert, and let another one count, or none.

    After a kill in between, the version that counts is missing, which is found and repaired.
    """
    set_aside(store.graph_paths, store.path_of(broken), why)

    def change(before: Manifest) -> Manifest:
        others = {index: item for index, item in before.experts.items() if index != broken.index}
        return _with_experts(before, {**others, **by})

    store.amend(change)


def _with_experts(before: Manifest, experts: Mapping[int, ExpertVersion]) -> Manifest:
    return dataclasses.replace(before, generation=before.generation + 1, experts=experts)


def _quarantine_place(graph_paths: GraphPaths, path: Path) -> Path:
    """The path below quarantine/ for `path`, once no folder on either way is a link."""
    place = graph_paths.quarantine / path.relative_to(graph_paths.root)
    parents = {*path.parents, *place.parents}
    refuse_links(sorted(folder for folder in parents if graph_paths.root in folder.parents))
    storage.make_dir(place.parent)
    return place
