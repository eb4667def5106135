"""Is the store what its manifest says? Every version, the history, the ledger, and what lies about.

Looking changes nothing. A finding is an *error* when something that counts is wrong, a *warning*
when something is lost or left over that nothing counts on, and a *note* when it is no fault.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flowrl.errors import ExpertError, FileRefusedError
from flowrl.experts import manifest as manifests
from flowrl.experts import quarantine
from flowrl.experts.manifest import Manifest
from flowrl.experts.store import ExpertStore, Pins
from flowrl.paths import GraphPaths
from flowrl.runs import ExpertVersion

Severity = Literal["error", "warning", "note"]
REPAIR = "stop the scheduler and run flowrl fsck GRAPH_PATH --repair"
_OF_CHECKPOINTS = {"global_latest.json", "global_latest.pkl", "global.lock", "history"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that fsck has to say: what, where, and what to do about it."""

    severity: Severity
    thing: str
    place: Path
    remedy: str


def look(store: ExpertStore, pinned: Pins) -> Iterator[Finding]:
    """Everything that is wrong with a graph's experts; `pinned` is what live runs started from."""
    try:
        present = store.manifest()
    except FileRefusedError as error:
        yield Finding(
            severity="error", thing=str(error), place=store.layout.manifest, remedy=REPAIR
        )
        return
    past = dict(_past(store))
    yield from _counted(store, present)
    yield from _history(store, present, past)
    yield from _spares(store, present, past)
    for manifest in (present, *(known for known in past.values() if known is not None)):
        yield from _sums(store, manifest)
    yield from _orphans(store, present, past, pinned)


def manifest_damage(layout: GraphPaths) -> str:
    """Why the manifest cannot be used, in a sentence with the remedy; nothing while it is whole."""
    try:
        ExpertStore(layout).manifest()
    except FileRefusedError as error:
        return f"the graph cannot go on: {error}"
    return ""


def damaged(store: ExpertStore, present: Manifest) -> Iterator[tuple[ExpertVersion, str]]:
    """The versions of a manifest that cannot be used, and why."""
    for version in present.experts.values():
        try:
            store.verify(version)
        except ExpertError as error:
            yield version, str(error)


def spares(store: ExpertStore, present: Manifest) -> dict[tuple[int, str], ExpertVersion]:
    """The versions that only the history names: what can be fallen back on."""
    found = {
        (version.index, version.version): version
        for manifest in (known for _, known in _past(store) if known is not None)
        for version in manifest.experts.values()
    }
    for version in present.experts.values():
        found.pop((version.index, version.version), None)
    return found


def unreadable(store: ExpertStore) -> tuple[Path, ...]:
    """The files of the history that are damaged."""
    return tuple(
        manifests.history_file(store.layout, generation)
        for generation, known in _past(store)
        if known is None
    )


def _past(store: ExpertStore) -> Iterator[tuple[int, Manifest | None]]:
    """The kept generations, oldest first; None stands for one that cannot be read."""
    for generation in manifests.generations(store.layout):
        path = manifests.history_file(store.layout, generation)
        try:
            known = manifests.read_file(path)
        except FileRefusedError:
            if path.exists():  # else it was collected meanwhile
                yield generation, None
            continue
        yield generation, known if known.generation == generation else None


def _counted(store: ExpertStore, present: Manifest) -> Iterator[Finding]:
    for version, why in damaged(store, present):
        yield Finding(severity="error", thing=why, place=store.path_of(version), remedy=REPAIR)


def _history(
    store: ExpertStore, present: Manifest, past: dict[int, Manifest | None]
) -> Iterator[Finding]:
    if present.generation and present.generation not in past:
        yield Finding(
            severity="warning",
            thing=f"generation {present.generation}, which counts, is not in the history",
            place=manifests.history_file(store.layout, present.generation),
            remedy=REPAIR,
        )
    for generation, known in past.items():
        place = manifests.history_file(store.layout, generation)
        if generation > present.generation:
            thing = f"generation {generation} was prepared and never came to count"
        elif known is None:
            thing = f"generation {generation} cannot be read: nobody can go back to it"
        elif known.merged != present.merged[: len(known.merged)]:
            thing = f"generation {generation} names runs that the ledger does not"
        elif generation == present.generation and known != present:
            thing = f"generation {generation} is not what the manifest says"
        else:
            continue
        yield Finding(severity="warning", thing=thing, place=place, remedy=REPAIR)


def _spares(
    store: ExpertStore, present: Manifest, past: dict[int, Manifest | None]
) -> Iterator[Finding]:
    for version in spares(store, present).values():
        place = store.path_of(version)
        try:
            store.verify(version)
        except ExpertError as error:
            name = f"expert {version.index} ({version.skill})"
            if quarantine.holds(store.layout, place):
                yield Finding(
                    severity="note",
                    thing=f"{name}: version {version.version} is lost, and known to be",
                    place=place,
                    remedy=f"none; what is left of it is in {store.layout.quarantine}",
                )
                continue
            thing = f"{error} (nothing uses it now)"
            yield Finding(severity="warning", thing=thing, place=place, remedy=REPAIR)


def _sums(store: ExpertStore, manifest: Manifest) -> Iterator[Finding]:
    place = manifests.history_file(store.layout, manifest.generation)
    counts = Counter(manifest.merged)
    for run_id in sorted(run_id for run_id in counts if counts[run_id] > 1):
        yield Finding(
            severity="error",
            thing=f"run {run_id} is in the ledger of generation {manifest.generation} twice",
            place=place,
            remedy=f"go back: flowrl rollback {store.layout.root}; and report it, it is a bug",
        )
    for version in manifest.experts.values():
        total = sum(part.frames for part in version.lineage)
        if total != version.frames:
            yield Finding(
                severity="error",
                thing=f"expert {version.index} ({version.skill}) has {version.frames} frames, its "
                f"lineage sums up to {total} (generation {manifest.generation})",
                place=place,
                remedy=f"go back: flowrl rollback {store.layout.root}; and report it, it is a bug",
            )


def _orphans(
    store: ExpertStore, present: Manifest, past: dict[int, Manifest | None], pinned: Pins
) -> Iterator[Finding]:
    named = {(v.index, v.version) for v in present.experts.values()} | set(spares(store, present))
    unsure = pinned is None or None in past.values()
    for key, place in () if unsure else store.versions():
        if _hidden(place) or key in named or key in (pinned or ()):
            continue
        if store.is_recent(present, key[1]):
            continue
        thing = f"version {key[1]} of expert {key[0]} is named by no manifest"
        yield Finding(severity="warning", thing=thing, place=place, remedy=REPAIR)
    for place in _strangers(store):
        yield Finding(
            severity="note",
            thing=f"{place.name} is nothing that flowrl has made",
            place=place,
            remedy="flowrl leaves it alone; move it away if nobody needs it",
        )


def _strangers(store: ExpertStore) -> Iterator[Path]:
    known = {path for _, path in store.versions()}
    for home in store.expert_folders():
        yield from (path for path in sorted(home.iterdir()) if path not in known | _hidden(path))
    if store.layout.history.is_dir():
        kept = manifests.generations(store.layout)
        known = {manifests.history_file(store.layout, generation) for generation in kept}
        for path in sorted(store.layout.history.iterdir()):
            if path not in known | _hidden(path):
                yield path
    if store.layout.checkpoints.is_dir():
        for path in sorted(store.layout.checkpoints.iterdir()):
            if path.name not in _OF_CHECKPOINTS and path not in _hidden(path):
                yield path


def _hidden(path: Path) -> set[Path]:
    """The path itself when it is a leftover, of which others tell."""
    return {path} if path.name.startswith(".") or path.name.endswith(".trash") else set()
