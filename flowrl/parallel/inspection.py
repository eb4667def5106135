"""Everything that `flowrl fsck` looks at, besides the experts themselves; nothing is changed.

What a scheduler at work is about to tidy up is no finding: while one holds the folder, leftovers
and the state's agreement with the manifest are not looked at.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, starmap
from pathlib import Path

from flowrl import notices
from flowrl.errors import ConfigError, FileRefusedError
from flowrl.experts import quarantine
from flowrl.experts.fsck import REPAIR, Finding, Severity, look
from flowrl.experts.manifest import Manifest
from flowrl.experts.store import ExpertStore
from flowrl.launchers.files import lock_held
from flowrl.parallel.health import daemon_of
from flowrl.parallel.obstacles import obstacles
from flowrl.parallel.recovery import (
    lost_skills,
    read_state,
    state_disagrees,
    usable_config,
)
from flowrl.parallel.run_folder import is_run_folder, live_runs, pinned_versions
from flowrl.parallel.skill_sources import read_skill_file
from flowrl.parallel.state import SchedulerState
from flowrl.parallel.status import Completed
from flowrl.paths import GraphPaths, RunPaths
from flowrl.runs import check_module, read_result, read_run

_LEFTOVER = re.compile(r"\.tmp-.*|\..*\.part|.*\.trash|.*\.orbax-checkpoint-tmp.*")
_SKILL_FOLDER = re.compile(r"(0|[1-9][0-9]*)_[A-Za-z0-9_]+")
_OTHERS = 0o077  # the bits of those who do not own a file


def inspect(layout: GraphPaths, *, claimed: bool = False) -> tuple[Finding, ...]:
    """What is wrong with a graph's folder, and what is worth knowing.

    `claimed` says that it is the caller who holds the folder. What keeps the graph from being
    repaired is told of alone: what else seems to be wrong may come of it.
    """
    if found := tuple(starmap(_obstacle, obstacles(layout))):
        return found
    quiet = claimed or not at_work(layout)
    parts = (
        look(ExpertStore(layout), pinned_versions(layout)),
        _records(layout),
        _skill_files(layout),
        _run_folders(layout),
        _state(layout) if quiet else (),
        (_left(path) for path in leftovers(layout)) if quiet else (),
        _access(layout),
        _told(layout),
    )
    return tuple(_addressed(finding, layout) for finding in chain.from_iterable(parts))


def _obstacle(place: Path, error: FileRefusedError) -> Finding:
    return Finding(
        severity="error",
        thing=str(error),
        place=place,
        remedy="that first: until then nothing else is looked at, and nothing is repaired",
    )


def _addressed(finding: Finding, layout: GraphPaths) -> Finding:
    """With the graph's own folder where a command line names any."""
    thing, remedy = (
        text.replace("GRAPH_PATH", str(layout.root)) for text in (finding.thing, finding.remedy)
    )
    return replace(finding, thing=thing, remedy=remedy)


def at_work(layout: GraphPaths) -> bool:
    """Whether a scheduler, or a repair, holds the folder now."""
    return daemon_of(layout.daemon_lock) is not None


def broken_records(layout: GraphPaths, present: Manifest) -> Iterator[tuple[Path, str]]:
    """Archived records of merged skills that cannot be used, and why."""
    for index, version in present.experts.items():
        archive = RunPaths(layout.skill_folder(index, version.skill), index)
        checks: tuple[tuple[Path, Callable[[], object]], ...] = (
            (archive.run_json, lambda archive=archive: _check_run(archive, present)),
            (archive.result_json, lambda archive=archive: read_result(archive)),
            (archive.module, lambda archive=archive: check_module(archive, read_run(archive))),
        )
        for path, check in checks:
            try:
                check()
            except FileRefusedError as error:
                yield path, str(error)
                if path == archive.run_json:
                    break  # the module cannot be judged without it


def leftovers(layout: GraphPaths) -> Iterator[Path]:
    """What a killed process left half-written or half-removed, outside of run folders."""
    for path in _paths(layout):
        if _LEFTOVER.fullmatch(path.name):
            yield path


def links(layout: GraphPaths) -> Iterator[Path]:
    """Symbolic links outside of run folders: flowrl makes none."""
    return (path for path in _paths(layout) if path.is_symlink())


def too_open(layout: GraphPaths) -> Iterator[tuple[Path, int]]:
    """Files and folders that others than their owner may use, with the mode they should have."""
    for path in chain((layout.root,), _paths(layout)):
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode) or not mode & _OTHERS:
            continue
        yield path, 0o700 if stat.S_ISDIR(mode) else 0o600


def _paths(layout: GraphPaths) -> Iterator[Path]:
    """Everything below the graph's folder, but for what is inside run folders and quarantine/."""
    for folder, folders, files in os.walk(layout.root):
        here = Path(folder)
        yield from (here / name for name in sorted((*folders, *files)))
        if here in {layout.training_runs, layout.failed_runs}:
            folders[:] = [name for name in folders if here / name == layout.failed_runs]
        if here == layout.root and layout.quarantine.name in folders:
            folders.remove(layout.quarantine.name)


def _check_run(archive: RunPaths, present: Manifest) -> None:
    run = read_run(archive)
    skill = present.experts[archive.expert].skill
    if (run.expert, run.skill) != (archive.expert, skill) or run.run_id not in present.merged:
        raise FileRefusedError(
            f"{archive.run_json} is of run {run.run_id} of expert {run.expert} ({run.skill}), "
            f"which is no merged run of expert {archive.expert} ({skill})"
        )


def _records(layout: GraphPaths) -> Iterator[Finding]:
    try:
        present = ExpertStore(layout).manifest()
    except FileRefusedError:
        return  # told of already
    untidied = {place.expert for place in live_runs(layout) if _in_ledger(place, present)}
    for path, why in broken_records(layout, present):
        if quarantine.holds(layout, path):
            kind: Severity = "note"
            remedy = f"none but a backup; what is left of it is in {layout.quarantine}"
        elif int(path.parent.name.partition("_")[0]) in untidied:
            kind, remedy = "note", "start the scheduler: it archives what it has merged"
        else:
            kind, remedy = "error", f"restore it from a backup, or {REPAIR} to do without"
        yield Finding(severity=kind, thing=why, place=path, remedy=remedy)


def _in_ledger(place: RunPaths, present: Manifest) -> bool:
    try:
        return read_run(place).run_id in present.merged
    except FileRefusedError:
        return False


def _skill_files(layout: GraphPaths) -> Iterator[Finding]:
    for path in sorted(layout.skill_files.glob("*.json")):
        try:
            read_skill_file(path)
        except FileRefusedError as error:
            remedy = f"restore it from a backup, or {REPAIR} to take the skill of the library"
            yield Finding(severity="error", thing=str(error), place=path, remedy=remedy)
    if layout.config_json.exists():
        try:
            usable_config(layout)
        except (FileRefusedError, ConfigError) as error:
            remedy = "none is needed: it is written again when the scheduler starts"
            place = layout.config_json
            yield Finding(severity="warning", thing=str(error), place=place, remedy=remedy)


def _run_folders(layout: GraphPaths) -> Iterator[Finding]:
    for place in live_runs(layout):
        try:
            run = read_run(place)
        except FileRefusedError as error:
            yield Finding(severity="error", thing=str(error), place=place.run_json, remedy=REPAIR)
            continue
        if place.result_json.exists() and not lock_held(place.folder):
            yield Finding(
                severity="note",
                thing=f"run {run.run_id} of {run.skill} has ended and is not merged",
                place=place.folder,
                remedy=f"start the scheduler: --graph_path {layout.root}",
            )


def _state(layout: GraphPaths) -> Iterator[Finding]:
    place = layout.scheduler_state
    recover = f"flowrl recover {layout.root}"
    try:
        state = read_state(layout)
        present = ExpertStore(layout).manifest()
    except FileRefusedError as error:
        if str(place) in str(error):
            yield Finding(severity="error", thing=str(error), place=place, remedy=recover)
        return
    if state is not None:
        yield from _agreement(layout, state, present)
    elif present.experts:
        thing = "the scheduler's state is lost"
        yield Finding(severity="error", thing=thing, place=place, remedy=recover)


def _agreement(layout: GraphPaths, state: SchedulerState, present: Manifest) -> Iterator[Finding]:
    place = layout.scheduler_state
    for skill in lost_skills(layout, state):
        thing = f"{skill} is completed, but no expert of it is in the manifest"
        yield Finding(severity="error", thing=thing, place=place, remedy=REPAIR)
    for thing in state_disagrees(state, present):
        yield Finding(severity="error", thing=thing, place=place, remedy=REPAIR)
    for version in present.experts.values():
        entry = state.entries.get(version.skill)
        if entry is None or not isinstance(entry.status, Completed):
            thing = f"{version.skill} is merged, which the state does not know yet"
            remedy = "start the scheduler: it finds out"
            yield Finding(severity="note", thing=thing, place=place, remedy=remedy)


def _left(path: Path) -> Finding:
    thing = f"{path.name} was left behind by a process that died"
    return Finding(severity="warning", thing=thing, place=path, remedy=REPAIR)


def _access(layout: GraphPaths) -> Iterator[Finding]:
    for path in links(layout):
        thing = f"{path.name} is a link to {path.readlink()}; flowrl follows none"
        yield Finding(severity="warning", thing=thing, place=path, remedy=REPAIR)
    for path, mode in too_open(layout):
        thing = f"{path.name} has mode {path.lstat().st_mode & 0o777:o}, others may use it"
        remedy = f"chmod {mode:o}, or {REPAIR}"
        yield Finding(severity="warning", thing=thing, place=path, remedy=remedy)


def _told(layout: GraphPaths) -> Iterator[Finding]:
    for key, text in notices.read(layout).items():
        remedy = "flowrl status shows it; flowrl fsck --repair withdraws what it has put right"
        yield Finding(severity="note", thing=text, place=layout.notice(key), remedy=remedy)
    for path in _strangers(layout):
        thing = f"{path.name} is nothing that flowrl has made"
        remedy = "flowrl leaves it alone; move it away if nobody needs it"
        yield Finding(severity="note", thing=thing, place=path, remedy=remedy)


def _strangers(layout: GraphPaths) -> Iterator[Path]:
    for folder in (layout.skills, layout.training_runs):
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            ours = _SKILL_FOLDER.fullmatch(path.name) or is_run_folder(path.name)
            if not ours and path != layout.failed_runs and not _LEFTOVER.fullmatch(path.name):
                yield path
