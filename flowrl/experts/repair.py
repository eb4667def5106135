"""When experts on disk are not what the manifest says: find it, go back, fall back, do without.

A check is a function that yields a `Finding` for every fault; a finding that can be repaired holds
its own `fix`. `flowrl.parallel.doctor` runs these checks and those of the rest of the graph.

Damaged files are moved to `quarantine/`, to the same place below it, with the reason beside them.
Nothing there is used again; fsck reports it as known. Going back never rewrites the past: it swaps
in a new generation with the experts of an old one. The ledger stays whole, so a run that was
rolled back is not merged again by a late process.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from flowrl import notices, storage
from flowrl.errors import ExpertCorruptError, ExpertError, ExpertMissingError, FileRefusedError
from flowrl.experts import manifest as manifests
from flowrl.experts.manifest import Manifest
from flowrl.experts.store import ExpertStore, Pins, refuse_misplaced
from flowrl.paths import GraphPaths
from flowrl.runs import ExpertVersion

logger = logging.getLogger(__name__)
REPAIR = "stop the scheduler and run flowrl fsck GRAPH_PATH --repair"
_REASON = ".why.txt"
ExpertKey = tuple[int, str]  # index and version
_IN_CHECKPOINTS = {"global_latest.json", "global_latest.pkl", "global.lock", "history"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault, or one thing worth knowing, and how it can be repaired.

    An *error* is damage to something that counts, a *warning* something lost or left over that
    nothing depends on, a *note* no fault. `done` says what `fix` did, unless it returns a sentence
    of its own, or False because it did nothing.
    """

    severity: Literal["error", "warning", "note"]
    thing: str
    place: Path
    remedy: str = REPAIR
    fix: Callable[[], object] | None = None
    done: str = ""


# Damage and its repair


def usable(store: ExpertStore, version: ExpertVersion) -> ExpertVersion:
    """Return the version if it is whole; else the newest earlier whole one, which counts now.

    Damage is logged as an error and shown by `flowrl status` until `flowrl fsck --repair` has run.

    Raises:
      ExpertMissingError, ExpertCorruptError: it is damaged, and no earlier version is whole.
    """
    try:
        store.verify(version)
    except ExpertError as error:
        return _replace(store, version, error)
    return version


def rollback(store: ExpertStore, generation: int) -> Manifest:
    """Make the experts of an earlier generation count again, as a new generation.

    If they are those that count now, nothing changes: the history keeps only so many generations.

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
    return store.amend(lambda before: _with_experts(before, past.experts))


def fall_back(store: ExpertStore, expert: int, why: str = "it was given up") -> ExpertVersion:
    """Make the newest earlier whole version of one expert count again; quarantine the current one.

    Raises:
      ExpertMissingError: the manifest does not name this expert.
      ExpertCorruptError: no earlier version is whole.
      FileRefusedError: a folder of the graph is not where it belongs; nothing has changed.
    """
    broken = _current(store, expert)
    version = _newest_whole(store, broken)
    _quarantine_place(store.layout, store.path_of(broken))
    store.amend(lambda before: _with_experts(before, {**before.experts, expert: version}))
    set_aside(store.layout, store.path_of(broken), why)
    return version


def drop(store: ExpertStore, expert: int, why: str) -> None:
    """Take an expert without a whole version out of the manifest; its skill trains again.

    Raises:
      ExpertMissingError: the manifest does not name this expert.
      FileRefusedError: a folder of the graph is not where it belongs; nothing has changed.
    """
    broken = _current(store, expert)
    _quarantine_place(store.layout, store.path_of(broken))
    store.amend(
        lambda before: _with_experts(
            before, {index: item for index, item in before.experts.items() if index != expert}
        )
    )
    set_aside(store.layout, store.path_of(broken), why)


def damaged(store: ExpertStore, versions: Iterable[ExpertVersion]) -> dict[ExpertKey, str]:
    """The versions that cannot be used, by index and name, and why."""
    found = {}
    for version in versions:
        try:
            store.verify(version)
        except ExpertError as error:
            found[version.index, version.version] = str(error)
    return found


def notice_key(expert: int) -> str:
    """The key of the notice of an expert's damage."""
    return f"damage_expert_{expert}"


# Quarantine


def set_aside(layout: GraphPaths, path: Path, why: str) -> Path:
    """Move a damaged file or folder to quarantine; of a lost one, keep only the reason.

    Raises:
      FileRefusedError: a link, a file or another disk is in the place of a folder of quarantine/.
    """
    place = reason = _quarantine_place(layout, path)
    if os.path.lexists(path):
        for number in itertools.count(1):
            if not os.path.lexists(place):
                break
            place = reason.with_name(f"{path.name}.{number}")
        storage.move_dir(path, place)
    storage.write_atomic(reason.with_name(reason.name + _REASON), why.rstrip() + "\n")
    return place


def is_set_aside(layout: GraphPaths, path: Path) -> bool:
    """Whether a damaged or lost file is known, and nothing has taken its place."""
    place = layout.quarantine / path.relative_to(layout.root)
    return place.with_name(place.name + _REASON).exists() and not os.path.lexists(path)


def _quarantine_place(layout: GraphPaths, path: Path) -> Path:
    """Where `path` goes, after making sure that it can be moved there."""
    refuse_misplaced(layout)
    place = layout.quarantine / path.relative_to(layout.root)
    for folder in reversed(place.parents):
        if not folder.is_relative_to(layout.quarantine) or not os.path.lexists(folder):
            continue
        if folder.is_symlink() or not folder.is_dir():
            problem = "is no folder of its own"
        elif folder.stat().st_dev != layout.root.stat().st_dev:
            problem = "is on another disk than the graph"
        else:
            continue
        raise FileRefusedError(
            f"{folder} {problem}, and damaged files cannot be moved into it; move it away: it is "
            "made again"
        )
    storage.make_dir(place.parent)
    return place


# The checks


def _check_current(store: ExpertStore, pinned: Pins) -> Iterator[Finding]:
    experts = store.manifest().experts
    for (index, _), why in damaged(store, experts.values()).items():
        fix = partial(_fall_back_or_drop, store, experts[index], why)
        yield Finding("error", why, store.path_of(experts[index]), fix=fix)


def _check_history(store: ExpertStore, pinned: Pins) -> Iterator[Finding]:
    layout, present = store.layout, store.manifest()
    renew = partial(manifests.write_history, layout, present)
    known = dict(manifests.read_history(layout))
    for generation, manifest in known.items():
        place = manifests.history_file(layout, generation)
        if generation > present.generation:
            thing = f"generation {generation} was prepared and never came to count"
            fix = partial(storage.remove_file, place)
            yield Finding("warning", thing, place, fix=fix, done=f"removed: {place}")
        elif manifest is None:
            thing = f"generation {generation} cannot be read, so no rollback to it is possible"
            fix = partial(_renew_generation, store, place)
            yield Finding("warning", thing, place, fix=fix, done=f"set aside: {place}")
        elif manifest.merged != present.merged[: len(manifest.merged)]:
            thing = f"generation {generation} names runs that the ledger does not"
            yield Finding("warning", thing, place, "report it, it is a bug")
        elif generation == present.generation and manifest != present:
            thing = f"generation {generation} is not what the manifest says"
            yield Finding("warning", thing, place, fix=renew, done=f"written again: {place}")
    if present.generation and present.generation not in known:
        thing = f"generation {present.generation}, which counts, is not in the history"
        place = manifests.history_file(layout, present.generation)
        yield Finding("warning", thing, place, fix=renew, done=f"written again: {place}")


def _check_spares(store: ExpertStore, pinned: Pins) -> Iterator[Finding]:
    spares = _spares(store)
    for (index, name), why in damaged(store, spares.values()).items():
        skill, place = spares[index, name].skill, store.path_of(spares[index, name])
        if is_set_aside(store.layout, place):
            thing = f"expert {index} ({skill}): version {name} is lost, and known to be"
            remedy = f"none; what is left of it is in {store.layout.quarantine}"
            yield Finding("note", thing, place, remedy)
        else:
            thing = f"{why} (nothing uses it now)"
            fix = partial(set_aside, store.layout, place, why)
            yield Finding("warning", thing, place, fix=fix, done=f"set aside: {place}")


def _check_sums(store: ExpertStore, pinned: Pins) -> Iterator[Finding]:
    remedy = f"go back: flowrl rollback {store.layout.root}; and report it, it is a bug"
    for manifest in _manifests(store):
        generation = manifest.generation
        place = manifests.history_file(store.layout, generation)
        for run_id, count in sorted(Counter(manifest.merged).items()):
            if count > 1:
                thing = f"run {run_id} is in the ledger of generation {generation} twice"
                yield Finding("error", thing, place, remedy)
        for version in manifest.experts.values():
            total = sum(part.frames for part in version.lineage)
            if total != version.frames:
                thing = (
                    f"expert {version.index} ({version.skill}) has {version.frames} frames, its "
                    f"lineage sums up to {total} (generation {generation})"
                )
                yield Finding("error", thing, place, remedy)


def _check_garbage(store: ExpertStore, pinned: Pins) -> Iterator[Finding]:
    present = store.manifest()
    history = [known for _, known in manifests.read_history(store.layout)]
    if pinned is None or None in history:
        return  # unknown manifests or runs may need any version
    named = {key for known in (present, *history) if known for key in known.versions}
    for key, place in store.versions():
        if key in named or key in pinned or store.is_recent(present, key[1]):
            continue
        if not _is_leftover(place):
            thing = f"version {key[1]} of expert {key[0]} is named by no manifest"
            fix = partial(store.collect_garbage, pinned)
            done = f"removed, since no manifest names it: {place}"
            yield Finding("warning", thing, place, fix=fix, done=done)


def _check_unknown_files(store: ExpertStore, pinned: Pins) -> Iterator[Finding]:
    layout = store.layout
    known = {path for _, path in store.versions()}
    known |= {manifests.history_file(layout, item) for item in manifests.generations(layout)}
    known |= {layout.checkpoints / name for name in _IN_CHECKPOINTS}
    for folder in (*store.expert_folders(), layout.history, layout.checkpoints):
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            if path not in known and not _is_leftover(path):
                yield unknown_file(path)


ExpertCheck = Callable[[ExpertStore, Pins], Iterator[Finding]]
CHECKS: tuple[ExpertCheck, ...] = (
    _check_current,
    _check_history,
    _check_spares,
    _check_sums,
    _check_garbage,
    _check_unknown_files,
)


def unknown_file(path: Path) -> Finding:
    """Return the note on a file that flowrl has not made."""
    remedy = "flowrl leaves it alone; move it away if nobody needs it"
    return Finding("note", f"{path.name} is nothing that flowrl has made", path, remedy)


def _replace(store: ExpertStore, broken: ExpertVersion, error: ExpertError) -> ExpertVersion:
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
        f"expert {broken.index} ({broken.skill}) was damaged: version {broken.version} "
        f"({broken.frames:,} frames) is in {store.layout.quarantine}, version {version.version} "
        f"({version.frames:,} frames) counts again. Seen? Then flowrl fsck {store.layout.root} "
        "--repair withdraws this notice"
    )
    logger.error("%s: %s", text, error)
    notices.publish(store.layout, notice_key(broken.index), text)
    return version


def _fall_back_or_drop(store: ExpertStore, broken: ExpertVersion, why: str) -> str:
    name = f"expert {broken.index} ({broken.skill})"
    try:
        found = fall_back(store, broken.index, why)
    except ExpertCorruptError:
        drop(store, broken.index, why)
        return f"{name} has no whole version: its skill will be trained again"
    return f"{name} is {found.version} again, of {found.frames:,} frames"


def _renew_generation(store: ExpertStore, place: Path) -> None:
    set_aside(store.layout, place, "it could not be read")
    present = store.manifest()
    if place == manifests.history_file(store.layout, present.generation):
        manifests.write_history(store.layout, present)


def _current(store: ExpertStore, expert: int) -> ExpertVersion:
    present = store.manifest()
    if expert not in present.experts:
        raise ExpertMissingError(f"expert {expert} is not in {store.layout.manifest}; train it")
    return present.experts[expert]


def _with_experts(before: Manifest, experts: Mapping[int, ExpertVersion]) -> Manifest:
    return dataclasses.replace(before, generation=before.generation + 1, experts=experts)


def _manifests(store: ExpertStore) -> list[Manifest]:
    """The manifest and every readable one of the history."""
    history = (known for _, known in manifests.read_history(store.layout) if known is not None)
    return [store.manifest(), *history]


def _spares(store: ExpertStore) -> dict[ExpertKey, ExpertVersion]:
    """The versions that only the history names: what can be fallen back on."""
    found = {
        (version.index, version.version): version
        for manifest in _manifests(store)
        for version in manifest.experts.values()
    }
    return {key: found[key] for key in found.keys() - store.manifest().versions}


def _newest_whole(store: ExpertStore, broken: ExpertVersion) -> ExpertVersion:
    """The newest whole version that is older than this one, by the history."""
    newest = manifests.generation_of(broken.version)
    earlier = {
        generation: version
        for (index, name), version in _spares(store).items()
        if index == broken.index
        and version.skill == broken.skill
        and (generation := manifests.generation_of(name)) < newest
    }
    for generation in sorted(earlier, reverse=True):
        if not damaged(store, [earlier[generation]]):
            return earlier[generation]
    raise ExpertCorruptError(
        f"expert {broken.index} ({broken.skill}) has no earlier version that is whole; "
        "train the skill again or restore it from a backup"
    )


def _is_leftover(path: Path) -> bool:
    """Whether a name is one of half-written or half-removed files, which another check reports."""
    return path.name.startswith(".") or path.name.endswith(".trash")
