"""A damaged manifest, taken again from the history, if nothing shows that a merge is lost by it."""

from __future__ import annotations

from flowrl.errors import FileRefusedError, FormatVersionError
from flowrl.experts import manifest as manifests
from flowrl.experts import quarantine
from flowrl.experts.manifest import Manifest
from flowrl.experts.store import ExpertStore
from flowrl.parallel.recovering import read_state
from flowrl.parallel.run_folders import live_runs
from flowrl.parallel.status import Completed
from flowrl.paths import GraphPaths, RunPaths
from flowrl.runs import read_run
from flowrl.storage import locks

_LOCK_SECONDS = 60.0


def restore_manifest(layout: GraphPaths) -> str:
    """Put the newest readable generation in the place of a damaged manifest; says so, or nothing.

    A generation is written to the history before it comes to count, so the newest one is what the
    manifest said, or a merge that was about to count. If the newest is damaged as well, an older
    one is taken only if no version folder, no archive and no completed skill tells of a later
    merge: what is lost then is at most a rollback or a fall-back.

    Raises:
      FileRefusedError: no generation can be read, or a merge would be lost; says which.
      FormatVersionError: a newer flowrl wrote it, or the newest generation.
    """
    try:
        ExpertStore(layout).manifest()
    except FormatVersionError:
        raise
    except FileRefusedError as error:
        why = str(error)
    else:
        return ""
    found, unreadable = _newest_readable(layout)
    lost = _later_merges(layout, found)
    path = manifests.history_file(layout, found.generation)
    if lost:
        raise FileRefusedError(
            f"{layout.manifest} is damaged, and so is the newest of its history. Generation "
            f"{found.generation} can be read, but these later merges would be lost: "
            f"{', '.join(lost)}. Restore {layout.checkpoints} from a backup, or lose them: "
            f"cp {path} {layout.manifest}"
        )
    with locks.held(layout.global_lock, timeout_seconds=_LOCK_SECONDS):
        quarantine.put(layout, layout.manifest, why)
        manifests.swap(layout, found)
    also = "".join(f"; generation {number} is damaged, too" for number in unreadable)
    return f"the manifest is generation {found.generation} of its history again{also}"


def _newest_readable(layout: GraphPaths) -> tuple[Manifest, tuple[int, ...]]:
    unreadable: list[int] = []
    for generation in reversed(manifests.generations(layout)):
        try:
            found = manifests.read_file(manifests.history_file(layout, generation))
        except FormatVersionError:
            if not unreadable:
                raise
            unreadable.append(generation)
        except FileRefusedError:
            unreadable.append(generation)
        else:
            return found, tuple(unreadable)
    raise FileRefusedError(
        f"{layout.manifest} is damaged, and no generation in {layout.history} can be read; "
        f"restore {layout.checkpoints} from a backup"
    )


def _later_merges(layout: GraphPaths, found: Manifest) -> list[str]:
    """The ids of runs that were merged after `found`, by what else is on disk."""
    said = {
        name.partition("-")[2]
        for (_, name), path in ExpertStore(layout).versions()
        if manifests.born_as(name) > found.generation and not path.name.endswith(".trash")
    }
    archives = (RunPaths(path.parent, 0) for path in layout.skills.glob("*/run.json"))
    said |= {run_id for archive in archives if (run_id := _run_id(archive))}
    said |= _completed(layout)
    can_be_repeated = {_run_id(place) for place in live_runs(layout)}
    return sorted(said - can_be_repeated - set(found.merged))


def _completed(layout: GraphPaths) -> set[str]:
    try:
        state = read_state(layout)
    except FileRefusedError:
        return set()
    statuses = (entry.status for entry in state.entries.values()) if state else ()
    return {status.run_id for status in statuses if isinstance(status, Completed)}


def _run_id(place: RunPaths) -> str | None:
    try:
        return read_run(place).run_id
    except FileRefusedError:
        return None
