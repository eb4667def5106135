"""The health of a graph's folder: one list of checks for `flowrl fsck` and `fsck --repair`.

A check yields a `Finding` for every fault, with the `fix` that `repair` calls, so each fault is
defined once. Damaged files go to `quarantine/`; only what a killed merge left and versions that no
manifest names are deleted, as at every start of a scheduler. Every fix may be repeated. A file that
another version of flowrl wrote is reported and left as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from flowrl import notices
from flowrl.errors import ConfigError, FileRefusedError, FlowrlError, FormatVersionError
from flowrl.experts import manifest as manifests
from flowrl.experts.repair import NOTICE, damage, drop, fall_back, set_aside, spares
from flowrl.experts.store import ExpertStore, refuse_misplaced
from flowrl.parallel.health import daemon_of
from flowrl.parallel.recovery import (
    recorded_config,
    recover_state,
    restore_manifest,
    state_fault,
)
from flowrl.parallel.run_folder import fail_run, live_runs, pinned_versions
from flowrl.parallel.skill_sources import GraphRecord, read_skill_file
from flowrl.paths import GraphPaths, RunPaths
from flowrl.runs import ExpertVersion, check_module, read_result, read_run
from flowrl.storage import records

REPAIR = "stop the scheduler and run flowrl fsck --repair"


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault, and how it can be repaired.

    An *error* is damage to something that counts, a *warning* something that nothing depends on.
    """

    severity: Literal["error", "warning"]
    thing: str
    place: Path
    remedy: str = REPAIR
    fix: Callable[[], str] | None = None  # returns a sentence about what it did, "" for nothing


def inspect(layout: GraphPaths) -> tuple[Finding, ...]:
    """Find what is wrong with a graph's folder; changes nothing.

    A damaged manifest is reported alone, because the other checks need it. While a scheduler is at
    work, the state, which it may be about to change, is not checked.

    Raises:
      FileRefusedError: a link or a file is in the place of a folder.
    """
    refuse_misplaced(layout)
    try:
        ExpertStore(layout).manifest()
    except FileRefusedError as error:
        return (Finding("error", str(error), layout.manifest),)
    at_work = daemon_of(layout.daemon_lock) is not None
    checks = (check for check in CHECKS if not (at_work and check is _check_state))
    return tuple(finding for check in checks for finding in check(layout))


def repair(layout: GraphPaths) -> Iterator[str]:
    """Repair what can be, and say in one sentence each what was done or could not be.

    The caller holds the graph's folder. The sentence is "" where nothing was to be done.
    """
    try:
        yield restore_manifest(layout)
    except FileRefusedError as error:
        yield f"not repaired: {error}"
        return  # every other repair needs the manifest
    for check in CHECKS:
        for finding in check(layout):
            yield _fixed(finding)
    ExpertStore(layout).recover(pinned_versions(layout))
    for key in notices.read(layout):
        if key.startswith(NOTICE):
            notices.withdraw(layout, key)


def _fixed(finding: Finding) -> str:
    try:
        return finding.fix() if finding.fix else ""
    except FlowrlError as error:
        return f"not repaired: {error}"


def _check_runs(layout: GraphPaths) -> Iterator[Finding]:
    for place in live_runs(layout):
        skill = place.folder.name.split("_", 2)[2]  # a slug is the slug of itself
        fix = partial(_fail_run, layout, place.expert, skill)
        yield from _unreadable(layout, place.run_json, partial(read_run, place), fix)


def _fail_run(layout: GraphPaths, expert: int, skill: str) -> str:
    return f"set aside: {fail_run(layout, expert, skill)}"


def _check_skill_files(layout: GraphPaths) -> Iterator[Finding]:
    for path in sorted(layout.skill_files.glob("*.json")):
        yield from _unreadable(layout, path, partial(read_skill_file, path))


def _check_graph(layout: GraphPaths) -> Iterator[Finding]:
    path = layout.graph_json
    if path.exists():  # without it, the next start makes it of the runs' records
        yield from _unreadable(layout, path, partial(records.read, path, GraphRecord))


def _check_config(layout: GraphPaths) -> Iterator[Finding]:
    path = layout.config_json
    if path.exists():  # the next run that is made writes it again
        yield from _unreadable(layout, path, partial(recorded_config, layout), severity="warning")


def _check_experts(layout: GraphPaths) -> Iterator[Finding]:
    store = ExpertStore(layout)
    for version in store.manifest().experts.values():
        if why := damage(store, version):
            fix = partial(_fall_back_or_drop, store, version, why)
            yield Finding("error", why, store.path_of(version), fix=fix)
    for version in spares(store):
        place = store.path_of(version)
        if place.is_dir() and (why := damage(store, version)):
            fix = partial(_set_aside, layout, place, why)
            yield Finding("warning", f"{why} (nothing uses it now)", place, fix=fix)


def _fall_back_or_drop(store: ExpertStore, broken: ExpertVersion, why: str) -> str:
    name = f"expert {broken.index} ({broken.skill})"
    found = fall_back(store, broken, why)
    if found is None:
        drop(store, broken, why)
        return f"{name} has no whole version: its skill will be trained again"
    return f"{name} is {found.version} again, of {found.frames:,} frames"


def _check_history(layout: GraphPaths) -> Iterator[Finding]:
    for generation in manifests.generations(layout):
        path = manifests.history_file(layout, generation)
        yield from _unreadable(layout, path, partial(manifests.read_file, path))


def _check_archives(layout: GraphPaths) -> Iterator[Finding]:
    """The records of merged skills, but for those that the next start archives."""
    live = {place.expert for place in live_runs(layout)}
    for index, version in ExpertStore(layout).manifest().experts.items():
        place = layout.archive(index, version.skill)
        for path, read in _readers(place) if index not in live else ():
            if path.exists():
                yield from _unreadable(layout, path, read)


def _readers(place: RunPaths) -> Iterator[tuple[Path, Callable[[], object]]]:
    yield place.run_json, partial(read_run, place)
    yield place.result_json, partial(read_result, place)
    with suppress(FileRefusedError):  # the module cannot be checked without the record
        yield place.module, partial(check_module, place, read_run(place))


def _check_state(layout: GraphPaths) -> Iterator[Finding]:
    place, remedy = layout.scheduler_state, f"flowrl recover {layout.root}"
    try:
        if thing := state_fault(layout):
            yield Finding("error", thing, place, remedy, partial(recover_state, layout))
    except FormatVersionError as error:
        yield Finding("error", str(error), place)


# In the order of repair: the state is made anew from all others.
CHECKS: tuple[Callable[[GraphPaths], Iterator[Finding]], ...] = (
    _check_runs,
    _check_skill_files,
    _check_graph,
    _check_config,
    _check_experts,
    _check_history,
    _check_archives,
    _check_state,
)


def _unreadable(
    layout: GraphPaths,
    path: Path,
    read: Callable[[], object],
    fix: Callable[[], str] | None = None,
    *,
    severity: Literal["error", "warning"] = "error",
) -> Iterator[Finding]:
    """A finding if a file cannot be used; unless there is another `fix`, it is set aside."""
    try:
        read()
    except FormatVersionError as error:
        yield Finding(severity, str(error), path, "use that version")
    except (FileRefusedError, ConfigError) as error:
        fix = fix or partial(_set_aside, layout, path, str(error))
        yield Finding(severity, str(error), path, fix=fix)


def _set_aside(layout: GraphPaths, path: Path, why: str) -> str:
    return f"set aside: {path} is {set_aside(layout, path, why)} now"
