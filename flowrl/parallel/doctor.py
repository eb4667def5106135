"""The health of a graph's folder: one list of checks for `flowrl fsck`, `--repair` and `recover`.

A check yields a `Finding` for every fault, with the `fix` that `repair` calls, so each fault is
defined once. Nothing is deleted but leftovers, links and versions that no manifest names; damaged
files go to `quarantine/`. Every fix may be repeated.

Some obstacles stop every repair: a folder moved away behind a link, a lock that is no file, a file
of a newer flowrl. A repair would take for lost what is only elsewhere or newer, so a person must
remove the obstacle first.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from flowrl import notices, storage
from flowrl.errors import (
    BusyError,
    ConfigError,
    FileRefusedError,
    FlowrlError,
    FormatVersionError,
)
from flowrl.experts import manifest as manifests
from flowrl.experts import repair as experts
from flowrl.experts.manifest import Manifest
from flowrl.experts.repair import REPAIR, Finding, is_set_aside, set_aside
from flowrl.experts.store import ExpertStore, misplaced, needed_folders
from flowrl.launchers.run_status import lock_held
from flowrl.parallel.health import daemon_of
from flowrl.parallel.recovery import (
    lost_skills,
    read_state,
    record_notice_key,
    recorded_config,
    recover_state,
    restore_manifest,
    state_disagrees,
    train_lost_again,
    usable_config,
)
from flowrl.parallel.run_folder import fail_run, is_run_folder, live_runs, pinned_versions
from flowrl.parallel.skill_sources import read_skill_file
from flowrl.parallel.state import SchedulerState
from flowrl.parallel.state_file import StateFile
from flowrl.parallel.status import Completed
from flowrl.paths import GraphPaths, RunPaths
from flowrl.runs import check_module, read_result, read_run
from flowrl.skills.skill import load_library
from flowrl.storage import locks, records

_LEFTOVER = re.compile(r"\.tmp-.*|\..*\.part|.*\.trash|.*\.orbax-checkpoint-tmp.*")
_SKILL_FOLDER = re.compile(r"(0|[1-9][0-9]*)_[A-Za-z0-9_]+")
_OTHERS = 0o077  # the permissions of those who do not own a file


def inspect(layout: GraphPaths, *, claimed: bool = False) -> tuple[Finding, ...]:
    """Find what is wrong with a graph's folder, and what is worth knowing; changes nothing.

    Obstacles are reported alone, because other faults may be their consequences. While a scheduler
    is at work, what it may be about to change is not checked; `claimed` says that the caller holds
    the folder.
    """
    remedy = "do that first; until then nothing else is checked or repaired"
    found = [Finding("error", str(error), place, remedy) for place, error in obstacles(layout)]
    if not found:
        at_work = not claimed and daemon_of(layout.daemon_lock) is not None
        for check in CHECKS:
            if not (at_work and check in _CHANGED_BY_A_SCHEDULER):
                found += check(layout)
    return tuple(_with_graph_path(finding, layout) for finding in found)


def repair(layout: GraphPaths) -> Iterator[str]:
    """Repair what can be, and say in one sentence each what was done or could not be.

    The caller holds the graph's folder.

    Raises:
      FileRefusedError: there is an obstacle; nothing has changed.
    """
    refuse_obstacles(layout)
    for check in CHECKS:
        try:
            found = list(check(layout))
        except FlowrlError as error:
            yield f"not repaired: {error}"
            continue
        yield from filter(None, map(_fixed, found))
        if check is _check_manifest and _present(layout) is None:
            return  # every other repair needs the manifest


def _fixed(finding: Finding) -> str:
    """Call a finding's fix; returns what was done, or why it could not be."""
    try:
        result = finding.fix() if finding.fix else False
    except FlowrlError as error:
        return f"not repaired: {error}"
    if result is False:
        return ""
    return result if isinstance(result, str) else finding.done


def _with_graph_path(finding: Finding, layout: GraphPaths) -> Finding:
    """Name the graph's own folder where a command line names any."""
    thing, remedy = (
        text.replace("GRAPH_PATH", str(layout.root)) for text in (finding.thing, finding.remedy)
    )
    return replace(finding, thing=thing, remedy=remedy)


# Obstacles


def refuse_obstacles(layout: GraphPaths) -> None:
    """Make sure that a graph can be repaired.

    Raises:
      FileRefusedError: a folder or a lock is none, or is a link; says how to go on.
      FormatVersionError: a newer flowrl wrote one of the files.
    """
    for _, error in obstacles(layout):
        raise error


def obstacles(layout: GraphPaths) -> Iterator[tuple[Path, FileRefusedError]]:
    """Everything that keeps a graph from being repaired: where it is, and a refusal."""
    folders = (*needed_folders(layout), layout.quarantine, layout.notices)
    found = [*misplaced(folders), *_locks_that_are_no_files(layout)]
    if not found:  # else reading could lead out of the graph
        found = list(misplaced(path for path in _folders_in_use(layout) if path.is_symlink()))
    yield from found or _newer_files(layout)


def _locks_that_are_no_files(layout: GraphPaths) -> Iterator[tuple[Path, FileRefusedError]]:
    for path in (layout.daemon_lock, layout.global_lock):
        try:
            locks.check_plain(path)
        except FileRefusedError as error:
            yield path, error


def _folders_in_use(layout: GraphPaths) -> Iterator[Path]:
    """The folders of live runs, and of experts that the manifest or its history names."""
    if layout.training_runs.is_dir():
        runs = sorted(layout.training_runs.iterdir())
        yield from (path for path in runs if is_run_folder(path.name))
    found: set[Path] = set()
    for path in _manifest_files(layout):
        try:
            versions = manifests.read_file(path).experts.values()
        except FileRefusedError:
            continue
        for version in versions:
            found |= {
                layout.skill_folder(version.index, version.skill),
                layout.expert_folder(version.index, version.skill),
                ExpertStore(layout).path_of(version),
            }
    yield from sorted(found)


def _newer_files(layout: GraphPaths) -> Iterator[tuple[Path, FileRefusedError]]:
    """A refusal for every file of another format; other damage is for the checks."""
    readers: dict[Path, Callable[[], object]] = {
        path: partial(manifests.read_file, path) for path in _manifest_files(layout)
    }
    readers[layout.scheduler_state] = StateFile(layout.scheduler_state).load
    readers[layout.config_json] = partial(records.read_document, layout.config_json)
    readers |= {path: partial(read_skill_file, path) for path in _skill_files(layout)}
    archives = (RunPaths(path, 0) for path in sorted(layout.skills.glob("*_*")))
    for place in (*archives, *live_runs(layout)):
        readers[place.run_json] = partial(read_run, place)
        readers[place.result_json] = partial(read_result, place)
    for path, read in readers.items():
        try:
            if os.path.lexists(path):
                read()
        except FormatVersionError as error:
            yield path, error
        except FileRefusedError:
            continue


def _manifest_files(layout: GraphPaths) -> Iterator[Path]:
    yield layout.manifest
    for generation in manifests.generations(layout):
        yield manifests.history_file(layout, generation)


def _skill_files(layout: GraphPaths) -> list[Path]:
    return sorted(layout.skill_files.glob("*.json"))


# Checks


def _present(layout: GraphPaths) -> Manifest | None:
    """The manifest; None if it is damaged, which its own check reports."""
    try:
        return ExpertStore(layout).manifest()
    except FileRefusedError:
        return None


def _check_manifest(layout: GraphPaths) -> Iterator[Finding]:
    try:
        ExpertStore(layout).manifest()
    except FileRefusedError as error:
        fix = partial(restore_manifest, layout)
        yield Finding("error", str(error), layout.manifest, fix=fix)


def _check_runs(layout: GraphPaths) -> Iterator[Finding]:
    for place in live_runs(layout):
        try:
            run = read_run(place)
        except FileRefusedError as error:
            fix = partial(_fail_run, layout, place, error)
            yield Finding("error", str(error), place.run_json, fix=fix)
            continue
        if place.result_json.exists() and not lock_held(place.folder):
            thing = f"run {run.run_id} of {run.skill} has ended and is not merged"
            remedy = f"start the scheduler: --graph_path {layout.root}"
            yield Finding("note", thing, place.folder, remedy)


def _fail_run(layout: GraphPaths, place: RunPaths, error: FileRefusedError) -> str:
    skill = place.folder.name.split("_", 2)[2]  # a slug is the slug of itself
    try:
        return f"set aside: {fail_run(layout, place.expert, skill)}"
    except BusyError:
        return f"not repaired: {error}; its run still lives: wait for its end"


def _check_skill_files(layout: GraphPaths) -> Iterator[Finding]:
    for path in _skill_files(layout):
        try:
            read_skill_file(path)
        except FileRefusedError as error:
            remedy = f"restore it from a backup, or {REPAIR} to take the skill of the library"
            fix = partial(_use_library, layout, path, error)
            yield Finding("error", str(error), path, remedy, fix)


def _use_library(layout: GraphPaths, path: Path, error: FileRefusedError) -> str:
    config = recorded_config(layout)
    library = load_library(config.ppo.env_name, config.graph.skills_dir)
    if path not in {layout.skill_file(name) for name in library}:
        raise error
    set_aside(layout, path, str(error))
    return f"{path.name} is set aside: the skill is that of the library now"


def _check_config(layout: GraphPaths) -> Iterator[Finding]:
    try:
        if layout.config_json.exists():
            usable_config(layout)
    except (FileRefusedError, ConfigError) as error:
        remedy = "none is needed: it is written again when the scheduler starts"
        yield Finding("warning", str(error), layout.config_json, remedy)


def _check_archives(layout: GraphPaths) -> Iterator[Finding]:
    present = _present(layout) or Manifest()
    not_archived: set[int] = set()
    for place in live_runs(layout):
        with suppress(FileRefusedError):
            if read_run(place).run_id in present.merged:
                not_archived.add(place.expert)
    for expert, path, why in _broken_records(layout, present):
        if is_set_aside(layout, path):
            remedy = f"none but a backup; what is left of it is in {layout.quarantine}"
            yield Finding("note", why, path, remedy)
        elif expert in not_archived:
            remedy = "start the scheduler: it archives what it has merged"
            yield Finding("note", why, path, remedy)
        else:
            remedy = f"restore it from a backup, or {REPAIR} to do without"
            fix = partial(set_aside, layout, path, why)
            yield Finding("error", why, path, remedy, fix, f"set aside: {path}")


def _broken_records(layout: GraphPaths, present: Manifest) -> Iterator[tuple[int, Path, str]]:
    """Archived records of merged skills that cannot be used: the expert, the file, and why."""
    for index, version in present.experts.items():
        archive = layout.archive(index, version.skill)
        try:
            run = read_run(archive)
            if (run.expert, run.skill) != (
                index,
                version.skill,
            ) or run.run_id not in present.merged:
                raise FileRefusedError(
                    f"{archive.run_json} is of run {run.run_id} of expert {run.expert} "
                    f"({run.skill}), which is no merged run of expert {index} ({version.skill})"
                )
        except FileRefusedError as error:
            yield index, archive.run_json, str(error)
            continue  # the module cannot be checked without it
        checks: tuple[tuple[Path, Callable[[], object]], ...] = (
            (archive.result_json, partial(read_result, archive)),
            (archive.module, partial(check_module, archive, run)),
        )
        for path, check in checks:
            try:
                check()
            except FileRefusedError as error:
                yield index, path, str(error)


def _check_leftovers(layout: GraphPaths) -> Iterator[Finding]:
    for path in _paths(layout):
        if _LEFTOVER.fullmatch(path.name):
            thing = f"{path.name} was left behind by a process that died"
            fix = partial(_remove_leftover, path)
            yield Finding("warning", thing, path, fix=fix, done=f"removed: {path}")


def _remove_leftover(path: Path) -> bool:
    if path.is_dir() and not path.is_symlink():
        storage.remove_tree(path)
    else:
        storage.remove_part_files(path.parent)
    return not path.exists()


def _check_state(layout: GraphPaths) -> Iterator[Finding]:
    """Whether the state can be read and agrees with the manifest."""
    place, recover = layout.scheduler_state, f"flowrl recover {layout.root}"
    try:
        state = read_state(layout)
    except FileRefusedError as error:
        yield Finding("error", str(error), place, recover, partial(_renew_state, layout))
        return
    present = _present(layout)
    if present is None:
        return
    if state is None:
        if present.experts:
            thing = "the scheduler's state is lost"
            yield Finding("error", thing, place, recover, partial(_renew_state, layout))
        return
    yield from _check_agreement(layout, state, present)


def _check_agreement(
    layout: GraphPaths, state: SchedulerState, present: Manifest
) -> Iterator[Finding]:
    place = layout.scheduler_state
    for thing in state_disagrees(state, present):
        yield Finding("error", thing, place, fix=partial(_renew_state, layout, thing))
    for skill in lost_skills(layout, state):
        thing = f"{skill} is completed, but no expert of it is in the manifest"
        done = f"{skill} will be trained again when the scheduler starts"
        yield Finding("error", thing, place, fix=partial(train_lost_again, layout), done=done)
    for version in present.experts.values():
        entry = state.entries.get(version.skill)
        if entry is None or not isinstance(entry.status, Completed):
            thing = f"{version.skill} is merged, which the state does not know yet"
            yield Finding("note", thing, place, "start the scheduler: it finds out")


def _renew_state(layout: GraphPaths, thing: str = "") -> str | bool:
    """Make the state anew, unless the fix of another finding has put `thing` right."""
    if thing and not any(finding.thing == thing for finding in _check_state(layout)):
        return False
    found = recover_state(layout, anew=True)
    return f"scheduler_state.json is made anew, with {len(found.skills)} skills" if found else False


def _check_access(layout: GraphPaths) -> Iterator[Finding]:
    """Links, of which flowrl makes none, and what others than the owner may use."""
    for path in (layout.root, *_paths(layout)):
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode) and path != layout.root:
            thing = f"{path.name} is a link to {path.readlink()}; flowrl follows none"
            done = f"removed: the link {path} to {path.readlink()}"
            yield Finding("warning", thing, path, fix=partial(storage.remove_file, path), done=done)
        elif mode & _OTHERS and not stat.S_ISLNK(mode):
            right = 0o700 if stat.S_ISDIR(mode) else 0o600
            thing = f"{path.name} has mode {mode & 0o777:o}, others may use it"
            remedy, fix = f"chmod {right:o}, or {REPAIR}", partial(path.chmod, right)
            yield Finding("warning", thing, path, remedy, fix, f"chmod {right:o} {path}")


def _check_notices(layout: GraphPaths) -> Iterator[Finding]:
    known = notices.read(layout)
    if not known:
        return
    store, present = ExpertStore(layout), _present(layout) or Manifest()
    broken = experts.damaged(store, present.experts.values())
    current = {experts.notice_key(index) for index, _ in broken}
    current |= {record_notice_key(index) for index, _, _ in _broken_records(layout, present)}
    for key, text in known.items():
        place, fix, done = layout.notice(key), None, ""
        if text.startswith("a notice cannot be read"):
            fix, done = partial(set_aside, layout, place, text), f"set aside: {place}"
        elif key.startswith(("damage_expert_", "record_expert_")) and key not in current:
            fix, done = partial(notices.withdraw, layout, key), f"withdrawn: the notice {key}"
        remedy = "flowrl status shows it; flowrl fsck --repair withdraws what it has put right"
        yield Finding("note", text, place, remedy, fix, done)


def _check_unknown_files(layout: GraphPaths) -> Iterator[Finding]:
    for folder in (layout.skills, layout.training_runs):
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            ours = _SKILL_FOLDER.fullmatch(path.name) or is_run_folder(path.name)
            if not ours and path != layout.failed_runs and not _LEFTOVER.fullmatch(path.name):
                yield experts.unknown_file(path)


def _check_experts(check: experts.ExpertCheck, layout: GraphPaths) -> Iterator[Finding]:
    if _present(layout) is not None:
        yield from check(ExpertStore(layout), pinned_versions(layout))


# In the order of repair: what a later repair needs comes first.
CHECKS: tuple[Callable[[GraphPaths], Iterator[Finding]], ...] = (
    _check_manifest,
    _check_runs,
    _check_skill_files,
    _check_config,
    *(partial(_check_experts, check) for check in experts.CHECKS),
    _check_archives,
    _check_leftovers,
    _check_state,
    _check_access,
    _check_notices,
    _check_unknown_files,
)
_CHANGED_BY_A_SCHEDULER = (_check_leftovers, _check_state)


def _paths(layout: GraphPaths) -> list[Path]:
    """Everything below the graph's folder, but for what is inside run folders and quarantine/."""
    found: list[Path] = []
    for folder, folders, files in os.walk(layout.root):
        here = Path(folder)
        found += (here / name for name in sorted((*folders, *files)))
        if here in {layout.training_runs, layout.failed_runs}:
            folders[:] = [name for name in folders if here / name == layout.failed_runs]
        if here == layout.root and layout.quarantine.name in folders:
            folders.remove(layout.quarantine.name)
    return found
