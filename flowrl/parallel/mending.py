"""What `flowrl fsck --repair` does: each step puts one kind of damage right, and says what it did.

Whoever calls this holds the graph's claim. Nothing is deleted but leftovers, links and versions
that no manifest names; what is damaged goes to `quarantine/`. Every step may be taken twice.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator

from flowrl import notices, storage
from flowrl.errors import BusyError, ExpertCorruptError, FileRefusedError, FlowrlError
from flowrl.experts import fsck, quarantine, repair
from flowrl.experts import manifest as manifests
from flowrl.experts.store import ExpertStore
from flowrl.parallel.inspection import broken_records, leftovers, links, too_open
from flowrl.parallel.obstacles import refuse_obstacles
from flowrl.parallel.recovery import (
    read_state,
    record_notice_key,
    recorded_config,
    recover_state,
    restore_manifest,
    state_disagrees,
    train_lost_again,
)
from flowrl.parallel.run_folder import fail_run, live_runs, pinned_versions
from flowrl.parallel.skill_sources import read_skill_file
from flowrl.paths import GraphPaths
from flowrl.runs import read_run
from flowrl.skills.skill import load_library

_NUMBERED = re.compile(r"[a-z_]+_(0|[1-9][0-9]*)")  # the keys of notices of an expert
logger = logging.getLogger(__name__)


def mend(layout: GraphPaths) -> Iterator[str]:
    """Put right what can be, and say in one sentence each what was done or could not be.

    Raises:
      FileRefusedError: something is in the way of any repair, see `obstacles`; nothing has changed.
    """
    refuse_obstacles(layout)
    steps: tuple[Callable[[GraphPaths], Iterator[str]], ...] = (
        _manifest,
        _experts,
        _spares,
        _records,
        _skill_files,
        _run_folders,
        _leftovers,
        _state,
        _access,
        _notices,
    )
    for step in steps:
        try:
            yield from step(layout)
        except FlowrlError as error:
            yield f"not mended: {error}"
            if step is _manifest:
                return  # all else hangs on it


def _manifest(layout: GraphPaths) -> Iterator[str]:
    if said := restore_manifest(layout):
        yield said


def _experts(layout: GraphPaths) -> Iterator[str]:
    store = ExpertStore(layout)
    for version, why in list(fsck.damaged(store, store.manifest())):
        name = f"expert {version.index} ({version.skill})"
        try:
            found = repair.fall_back(store, version.index, why)
        except ExpertCorruptError:
            repair.drop(store, version.index, why)
            yield f"{name} has no whole version: its skill will be trained again"
        else:
            yield f"{name} is {found.version} again, of {found.frames:,} frames"


def _spares(layout: GraphPaths) -> Iterator[str]:
    store = ExpertStore(layout)
    for path in fsck.unreadable(store):
        yield f"set aside: {quarantine.put(layout, path, 'it could not be read')}"
    for version in fsck.spares(store, store.manifest()).values():
        path = store.path_of(version)
        if quarantine.holds(layout, path) and not path.exists():
            continue
        try:
            store.verify(version)
        except FlowrlError as error:
            yield f"set aside: {quarantine.put(layout, path, str(error))}"


def _records(layout: GraphPaths) -> Iterator[str]:
    present = ExpertStore(layout).manifest()
    for path, why in list(broken_records(layout, present)):
        if path.exists() or not quarantine.holds(layout, path):
            yield f"set aside: {quarantine.put(layout, path, why)}"


def _skill_files(layout: GraphPaths) -> Iterator[str]:
    for path in sorted(layout.skill_files.glob("*.json")):
        try:
            read_skill_file(path)
        except FileRefusedError as error:
            config = recorded_config(layout)
            library = load_library(config.env_name, config.skills_dir)
            if path not in {layout.skill_file(name) for name in library}:
                yield f"not mended: {error}"
                continue
            quarantine.put(layout, path, str(error))
            yield f"{path.name} is set aside: the skill is that of the library now"


def _run_folders(layout: GraphPaths) -> Iterator[str]:
    for place in list(live_runs(layout)):
        try:
            read_run(place)
        except FileRefusedError as error:
            skill = place.folder.name.split("_", 2)[2]  # a slug is the slug of itself
            try:
                yield f"set aside: {fail_run(layout, place.expert, skill)}"
            except BusyError:
                yield f"not mended: {error}; its run still lives: wait for its end"


def _leftovers(layout: GraphPaths) -> Iterator[str]:
    for path in list(leftovers(layout)):
        if path.is_dir() and not path.is_symlink():
            storage.remove_tree(path)
        else:
            storage.remove_part_files(path.parent)
        if not path.exists():
            yield f"removed: {path}"
    store = ExpertStore(layout)
    present = store.manifest().generation
    known = manifests.generations(layout)
    for generation in (number for number in known if number > present):
        yield f"removed: {manifests.history_file(layout, generation)}"
    if present and present not in known:
        yield f"written again: {manifests.history_file(layout, present)}"
    for path in store.recover(pinned_versions(layout)):
        yield f"removed, since no manifest names it: {path}"


def _state(layout: GraphPaths) -> Iterator[str]:
    anew = _state_is_wrong(layout)
    if anew and (found := recover_state(layout, anew=True)):
        yield f"scheduler_state.json is made anew, with {len(found.skills)} skills"
    for skill in train_lost_again(layout):
        yield f"{skill} will be trained again when the scheduler starts"


def _state_is_wrong(layout: GraphPaths) -> bool:
    present = ExpertStore(layout).manifest()
    try:
        state = read_state(layout)
    except FileRefusedError:
        return True
    if state is None:
        return bool(present.experts)
    return any(state_disagrees(state, present))


def _access(layout: GraphPaths) -> Iterator[str]:
    for path in list(links(layout)):
        target = path.readlink()
        storage.remove_file(path)
        yield f"removed: the link {path} to {target}"
    for path, mode in list(too_open(layout)):
        path.chmod(mode)
        yield f"chmod {mode:o} {path}"


def _notices(layout: GraphPaths) -> Iterator[str]:
    """Withdraw the notices of damage that is no more, and those that cannot be read."""
    present = ExpertStore(layout).manifest()
    broken = {version.index for version, _ in fsck.damaged(ExpertStore(layout), present)}
    unwritten = {int(path.parent.name.split("_")[0]) for path, _ in broken_records(layout, present)}
    for key, text in notices.read(layout).items():
        unreadable = text.startswith("a notice cannot be read")
        found = _NUMBERED.fullmatch(key)
        number = int(found[1]) if found else -1
        damage = key == repair.notice_key(number) and number not in broken
        record = key == record_notice_key(number) and number not in unwritten
        if unreadable:
            yield f"set aside: {quarantine.put(layout, layout.notice(key), text)}"
        elif damage or record:
            notices.withdraw(layout, key)
            yield f"withdrawn: the notice {key}"
