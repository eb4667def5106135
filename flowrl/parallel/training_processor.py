"""From a finished run folder to merged experts and an archive, exactly once.

The order is: verify, commit (one manifest swap, which also records the run id), archive, remove the
folder; the scheduler starts the dependants in between. Killed anywhere, the same call made again
ends in the same place; `recover_graph` makes it for every run at start.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl import storage
from flowrl.config import FrameAccounting
from flowrl.errors import BusyError, ExpertError, FileRefusedError, ResultRefusedError
from flowrl.experts import rooms
from flowrl.experts.manifest import Manifest
from flowrl.experts.merge import (
    Candidate,
    FrameRule,
    KeepCurrent,
    MergeDecision,
    MergeRule,
    UseCandidate,
)
from flowrl.experts.store import Commit, ExpertStore
from flowrl.launchers.files import lock_held
from flowrl.parallel import comparisons
from flowrl.parallel.run_folder import live_runs, pinned_versions, remove_part_files
from flowrl.parallel.verification import records, tracker_folders, verified_candidates
from flowrl.paths import GraphPaths, RunPaths
from flowrl.runs import TrainingRun, read_result, read_run

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """What recovery found: summaries of merged runs, and why other finished runs were refused."""

    merged: tuple[dict[str, Any], ...]
    refused: Mapping[Path, str]


def process_completed_training(
    run_folder: Path | str,
    skill_name: str,
    global_expert_idx: int,
    base_dir: Path | str,
    *,
    frame_accounting: FrameAccounting = "acted",
    merge_policy: MergeRule | None = None,
) -> dict[str, Any]:
    """Merge a finished run's experts, archive its records and remove its folder.

    Called again for the same run it changes nothing and says `already_merged`. The answer holds
    `run_id`, `skill`, `expert`, `generation`, `already_merged`, `frames`, `success_rate`,
    `wall_seconds` and `experts`: by global index, `verdict` ("take" or "keep"), `why`, `frames` and
    `version`.

    Args:
      run_folder: as `prepare_training_run` made it, with the trainer's result.json.
      skill_name, global_expert_idx: what the run trained.
      base_dir: the graph's folder.
      frame_accounting: what the frame rule credits an expert with.
      merge_policy: the rule to merge by, instead of the frame rule.

    Raises:
      ResultRefusedError: the result is of another run, incomplete or damaged; nothing has changed.
      FileRefusedError: there is no such run, or the manifest is damaged.
      ComparingError: a program answers the questions of the rule; try again.
      BusyError: another process merges for longer than a minute; try again.
    """
    layout = GraphPaths(Path(base_dir))
    place = RunPaths(Path(run_folder), global_expert_idx)
    rule = merge_policy or FrameRule()
    merged = merge_run(layout, place, skill_name, accounting=frame_accounting, rule=rule)
    archive_run(layout, place, skill_name)
    return merged


def merge_run(
    layout: GraphPaths,
    place: RunPaths,
    skill: str,
    *,
    accounting: FrameAccounting,
    rule: MergeRule,
) -> dict[str, Any]:
    """The first half of `process_completed_training`: its experts count, its folder stays."""
    store = ExpertStore(layout)
    if not place.folder.is_dir():
        return _of_archive(_archive(layout, place, skill), store.manifest(), place)
    run = _read(place, skill)
    candidates: tuple[Candidate, ...] = ()
    if run.run_id not in store.manifest().merged:
        _, candidates = verified_candidates(place, run, accounting)
        storage.fault_point("merge.verified")
    commit = _commit(store, place, run, candidates=candidates, rule=rule)
    return _summary(place, run, commit)


def archive_run(layout: GraphPaths, place: RunPaths, skill: str) -> None:
    """The second half: archive a merged run's records, remove its folder, collect garbage.

    Nothing waits for it, and what it leaves undone `recover_graph` does at the next start.
    """
    store = ExpertStore(layout)
    if not place.folder.is_dir():
        return
    run = _read(place, skill)
    if run.run_id in store.manifest().merged:
        comparisons.clear(layout, run.run_id)
        _archive_records(place, _archive(layout, place, skill))
        store.collect_garbage(pinned_versions(layout))


def recover_graph(
    layout: GraphPaths, rule: MergeRule | None = None, *, min_success_rate: float = 0.0
) -> Recovery:
    """Roll every finished run forward, and remove what a kill or a power cut left behind.

    Left to the scheduler: runs with a living process, without a result, whose experts are being
    compared, or that succeeded less often than `min_success_rate` and are not merged yet. Nothing
    else may prepare or merge runs of this graph meanwhile.

    Raises:
      FileRefusedError: the manifest is damaged; says which history file to restore.
    """
    rooms.refuse_moved(layout)
    ExpertStore(layout).recover(pinned_versions(layout))
    for folder in (layout.training_runs, layout.failed_runs):
        storage.remove_leftovers(folder)
    remove_part_files(layout)
    comparisons.sweep(layout, _run_ids(layout))
    merged: list[dict[str, Any]] = []
    refused: dict[Path, str] = {}
    for place in live_runs(layout):
        if lock_held(place.folder) or not place.result_json.exists():
            continue
        try:
            if _is_due(layout, place, min_success_rate):
                merged.append(_roll_forward(layout, place, rule))
        except BusyError as error:  # left to the scheduler, which tries again
            logger.info("%s", error)
        except (ResultRefusedError, FileRefusedError, ExpertError) as error:
            logger.warning("a finished run is refused", extra={"why": str(error)})
            refused[place.folder] = str(error)
    return Recovery(merged=tuple(merged), refused=refused)


def _run_ids(layout: GraphPaths) -> set[str]:
    """The ids of all live runs whose records can be read."""
    found: set[str] = set()
    for place in live_runs(layout):
        with suppress(FileRefusedError):
            found.add(read_run(place).run_id)
    return found


def _is_due(layout: GraphPaths, place: RunPaths, min_success_rate: float) -> bool:
    if read_run(place).run_id in ExpertStore(layout).manifest().merged:
        return True
    return read_result(place).success_rate >= min_success_rate


def _roll_forward(layout: GraphPaths, place: RunPaths, rule: MergeRule | None) -> dict[str, Any]:
    run = read_run(place)
    return process_completed_training(
        place.folder,
        run.skill,
        place.expert,
        layout.root,
        frame_accounting=run.config.get("frame_accounting", "acted"),
        merge_policy=rule,
    )


def _archive(layout: GraphPaths, place: RunPaths, skill: str) -> RunPaths:
    return RunPaths(layout.skill_folder(place.expert, skill), place.expert)


def _read(place: RunPaths, skill: str) -> TrainingRun:
    run = read_run(place)
    if (run.expert, run.skill) != (place.expert, skill):
        raise ResultRefusedError(
            f"{place.run_json}: give the call what the run is of\n"
            f"- expert {place.expert} ({skill})\n+ expert {run.expert} ({run.skill})"
        )
    return run


def _commit(
    store: ExpertStore,
    place: RunPaths,
    run: TrainingRun,
    *,
    candidates: Sequence[Candidate],
    rule: MergeRule,
) -> Commit:
    """Merge, once the rule's questions are answered; without the lock until then."""
    questions = store.questions(run.run_id, candidates, rule=rule)
    evidence = comparisons.evidence(store.layout, place, run, questions)
    storage.fault_point("merge.informed")
    commit = store.commit(run.run_id, candidates, rule=rule, evidence=evidence)
    logger.debug("merged", extra={"run_id": run.run_id, "generation": commit.manifest.generation})
    return commit


def _archive_records(place: RunPaths, archive: RunPaths) -> None:
    """Archive a merged run, then remove its folder."""
    storage.fault_point("merge.committed")
    storage.make_dir(archive.folder)
    for source, target in zip(tracker_folders(place), tracker_folders(archive), strict=True):
        _archive_folder(source, target)
    pairs = dict(zip(records(place), records(archive), strict=True))
    for source, target in list(pairs.items()):
        if not source.exists():
            storage.remove_file(target)  # of an earlier run of the skill
            del pairs[source]
    for source, target in pairs.items():
        storage.copy_file(source, target)
    storage.fault_point("merge.archived")
    storage.remove_tree(place.folder)
    storage.fault_point("merge.removed")


def _archive_folder(source: Path, target: Path) -> None:
    """Put a copy in the place of what is there; what cannot be read is left out."""
    prepared = target.with_name(f".tmp-{target.name}")
    for left in (prepared, target):  # of a merge that was killed, or an earlier run of the skill
        storage.remove_tree(left)
    if not os.path.lexists(source):
        return
    left_out: list[Path] = []
    try:
        storage.copy_trees({prepared: source}, left_out=left_out)
    except (FileRefusedError, FileNotFoundError, PermissionError) as error:
        logger.warning("%s is not archived: %s", source, error)
        storage.remove_tree(prepared)
        return
    storage.move_dir(prepared, target)
    if left_out:
        names = ", ".join(path.name for path in left_out)
        logger.warning("left out of %s: %s; only plain files are archived", target, names)


def _of_archive(archive: RunPaths, manifest: Manifest, place: RunPaths) -> dict[str, Any]:
    """The answer for a run whose folder is gone because it was merged."""
    if archive.run_json.exists():
        run = read_run(archive)
        if run.run_id in manifest.merged:
            commit = Commit(manifest=manifest, decisions={}, already_merged=True)
            return _summary(archive, run, commit)
    raise FileRefusedError(
        f"{place.folder} does not exist and {archive.folder} holds no merged run; train the skill"
    )


def _summary(place: RunPaths, run: TrainingRun, commit: Commit) -> dict[str, Any]:
    result = read_result(place)
    return {
        "run_id": run.run_id,
        "skill": run.skill,
        "expert": run.expert,
        "generation": commit.manifest.generation,
        "already_merged": commit.already_merged,
        "frames": result.frames,
        "success_rate": result.success_rate,
        "wall_seconds": result.wall_seconds,
        "experts": {
            expert: _expert_summary(expert, run, commit)
            for expert in run.experts
            if expert in commit.manifest.experts  # a rollback may have taken it out
        },
    }


def _expert_summary(expert: int, run: TrainingRun, commit: Commit) -> dict[str, Any]:
    version = commit.manifest.experts[expert]
    decision = commit.decisions.get(expert) or _past_decision(run, commit, expert)
    return {
        "verdict": "take" if isinstance(decision, UseCandidate) else "keep",
        "why": decision.why,
        "frames": version.frames,
        "version": version.version,
    }


def _past_decision(run: TrainingRun, commit: Commit, expert: int) -> MergeDecision:
    """What is left of an earlier merge: whether the expert of today carries this run."""
    version = commit.manifest.experts[expert]
    if any(part.run_id == run.run_id for part in version.lineage):
        return UseCandidate(frames=version.frames, why="merged before")
    return KeepCurrent(why="merged before, not in today's version")
