"""When experts on disk are not what the manifest says: go back, fall back, or do without.

Going back never rewrites the past: it swaps in a new generation with the experts of an old one.
The ledger stays whole, so a run that was rolled back is not merged again by a late process.
"""

from __future__ import annotations

import dataclasses
import logging
from types import MappingProxyType

from flowrl import notices
from flowrl.errors import ExpertCorruptError, ExpertError, ExpertMissingError, FileRefusedError
from flowrl.experts import manifest as manifests
from flowrl.experts import quarantine, rooms
from flowrl.experts.manifest import Manifest
from flowrl.experts.store import ExpertStore
from flowrl.runs import ExpertVersion

logger = logging.getLogger(__name__)


def notice_key(expert: int) -> str:
    """The key of the notice that tells of an expert's damage."""
    return f"damage_expert_{expert}"


def usable(store: ExpertStore, version: ExpertVersion) -> ExpertVersion:
    """The version, if it is whole; else the newest earlier whole one, which counts from now on.

    Damage is logged as an error and shown by `flowrl status` until `flowrl fsck --repair` has run.

    Raises:
      ExpertMissingError, ExpertCorruptError: it is damaged, and no earlier version is whole.
    """
    try:
        store.verify(version)
    except ExpertError as error:
        return _replaced(store, version, error)
    return version


def rollback(store: ExpertStore, generation: int) -> Manifest:
    """Make the experts of an earlier generation count again, as a new generation.

    If they are those that count now, nothing changes: the history holds so many generations only.

    Raises:
      FileRefusedError: the history does not hold that generation, or another in its place.
      ExpertMissingError, ExpertCorruptError: one of its versions cannot be used any more.
    """
    known = manifests.generations(store.layout)
    if generation not in known:
        span = f"{known[0]} to {known[-1]}" if known else "none"
        raise FileRefusedError(
            f"{store.layout.history} holds no generation {generation}; choose among {span}"
        )
    path = manifests.history_file(store.layout, generation)
    past = manifests.read_file(path)
    if past.generation != generation:
        raise FileRefusedError(f"{path} is of generation {past.generation}; choose another one")
    for version in past.experts.values():
        store.verify(version)
    present = store.manifest()
    if past.experts == present.experts:
        return present
    logger.warning("rolled back to generation %d", generation)
    return store.amend(
        lambda before: dataclasses.replace(
            before, generation=before.generation + 1, experts=past.experts
        )
    )


def fall_back(store: ExpertStore, expert: int, why: str = "it was given up") -> ExpertVersion:
    """Make the newest earlier version of one expert that is whole count again.

    The version that counted is moved to `quarantine/`, with the reason why.

    Raises:
      ExpertMissingError: the manifest does not name this expert.
      ExpertCorruptError: no earlier version is whole.
      FileRefusedError: a folder of the graph is not where it belongs; nothing has changed.
    """
    broken = _present(store, expert)
    rooms.refuse_moved(store.layout)
    version = _newest_whole(store, broken)
    quarantine.make_ready(store.layout, store.path_of(broken))
    store.amend(lambda before: _with(before, version))
    quarantine.put(store.layout, store.path_of(broken), why)
    return version


def drop(store: ExpertStore, expert: int, why: str) -> None:
    """Take an expert of which no version is whole out of the manifest; its skill trains again.

    Raises:
      ExpertMissingError: the manifest does not name this expert.
      FileRefusedError: a folder of the graph is not where it belongs; nothing has changed.
    """
    broken = _present(store, expert)
    rooms.refuse_moved(store.layout)
    quarantine.make_ready(store.layout, store.path_of(broken))
    store.amend(lambda before: _without(before, expert))
    quarantine.put(store.layout, store.path_of(broken), why)


def _replaced(store: ExpertStore, broken: ExpertVersion, error: ExpertError) -> ExpertVersion:
    name = f"expert {broken.index} ({broken.skill})"
    try:
        version = fall_back(store, broken.index, str(error))
    except ExpertCorruptError:
        text = (
            f"{error}. No earlier version is whole: restore the files from a backup, or stop the "
            f"scheduler and run flowrl fsck {store.layout.root} --repair, which lets the skill "
            "train again"
        )
        logger.error("%s", text)
        notices.publish(store.layout, notice_key(broken.index), text)
        raise type(error)(text) from error
    text = (
        f"{name} was damaged: version {broken.version} ({broken.frames:,} frames) is in "
        f"{store.layout.quarantine}, version {version.version} ({version.frames:,} frames) counts "
        f"again. Seen? Then flowrl fsck {store.layout.root} --repair withdraws this notice"
    )
    logger.error("%s: %s", text, error)
    notices.publish(store.layout, notice_key(broken.index), text)
    return version


def _present(store: ExpertStore, expert: int) -> ExpertVersion:
    present = store.manifest()
    if expert not in present.experts:
        raise ExpertMissingError(f"expert {expert} is not in {store.layout.manifest}; train it")
    return present.experts[expert]


def _with(before: Manifest, version: ExpertVersion) -> Manifest:
    experts = MappingProxyType({**before.experts, version.index: version})
    return dataclasses.replace(before, generation=before.generation + 1, experts=experts)


def _without(before: Manifest, expert: int) -> Manifest:
    rest = {index: version for index, version in before.experts.items() if index != expert}
    return dataclasses.replace(
        before, generation=before.generation + 1, experts=MappingProxyType(rest)
    )


def _newest_whole(store: ExpertStore, broken: ExpertVersion) -> ExpertVersion:
    for version in _earlier(store, broken):
        try:
            store.verify(version)
        except ExpertError:
            continue
        return version
    raise ExpertCorruptError(
        f"expert {broken.index} ({broken.skill}) has no earlier version that is whole; "
        "train the skill again or restore it from a backup"
    )


def _earlier(store: ExpertStore, broken: ExpertVersion) -> list[ExpertVersion]:
    """The versions from before this one that the history names, newest first."""
    found: dict[int, ExpertVersion] = {}
    for generation in manifests.generations(store.layout):
        try:
            past = manifests.read_file(manifests.history_file(store.layout, generation))
        except FileRefusedError:
            continue
        version = past.experts.get(broken.index)
        if version is not None and version.skill == broken.skill:
            found[manifests.generation_of(version.version)] = version
    newest = manifests.generation_of(broken.version)
    return [found[number] for number in sorted(found, reverse=True) if number < newest]
