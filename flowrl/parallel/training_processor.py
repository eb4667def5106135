"""Merge a finished run's experts, archive its records and remove its folder, exactly once.

The order is: verify, commit (one swap of the manifest, which also records the run id), archive,
remove the folder. The scheduler starts the dependants after the commit. After a kill at any point
the same call leads to the same end; `recover_graph` makes it for every run at start.
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
from flowrl.experts.manifest import Manifest
from flowrl.experts.merge import (
    Candidate,
    KeepCurrent,
    MergeDecision,
    MergeRule,
    UseCandidate,
    frame_count,
)
from flowrl.experts.store import Commit, ExpertStore, refuse_misplaced
from flowrl.launchers.run_status import lock_held
from flowrl.parallel import comparisons
from flowrl.parallel.run_folder import live_runs, pinned_versions, remove_part_files
from flowrl.parallel.verification import verified_candidates
from flowrl.paths import GraphPaths, RunPaths
from flowrl.runs import TrainingRun, read_result, read_run

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """The summaries of the merged runs, and by folder why other finished runs were refused."""

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

    Called again for the same run it changes nothing and returns `already_merged`. The keys are
    `run_id`, `skill`, `expert`, `generation`, `already_merged`, `frames`, `success_rate`,
    `wall_seconds` and `experts`: by global index, `verdict` ("take" or "keep"), `why`, `frames` and
    `version`.

    Args:
      run_folder: as `prepare_training_run` made it, with the trainer's result.json.
      skill_name, global_expert_idx: the skill and the expert that the run trained.
      base_dir: the graph's folder.
      frame_accounting: the frames that the frame rule credits an expert with.
      merge_policy: the rule to merge by (default: the frame rule).

    Raises:
      ResultRefusedError: the result is of another run, incomplete or damaged; nothing has changed.
      FileRefusedError: there is no such run, or the manifest is damaged.
      ComparingError: a program answers the questions of the rule; try again.
      BusyError: another process merges for longer than a minute; try again.
    """
    layout = GraphPaths(Path(base_dir))
    paths = RunPaths(Path(run_folder), global_expert_idx)
    rule = merge_policy or frame_count
    summary = merge_run(layout, paths, skill_name, accounting=frame_accounting, rule=rule)
    archive_run(layout, paths, skill_name)
    return summary


def merge_run(
    layout: GraphPaths,
    paths: RunPaths,
    skill: str,
    *,
    accounting: FrameAccounting,
    rule: MergeRule,
) -> dict[str, Any]:
    """Do the first half of `process_completed_training`: merge the experts, keep the folder."""
    store = ExpertStore(layout)
    if not paths.folder.is_dir():
        return _archived_summary(layout.archive(paths.expert, skill), store.manifest(), paths)
    run = _read_own_run(paths, skill)
    candidates: tuple[Candidate, ...] = ()
    if run.run_id not in store.manifest().merged:
        candidates = verified_candidates(paths, run, accounting)
        storage.fault_point("merge.verified")
    commit = _commit(store, paths, run, candidates=candidates, rule=rule)
    return _summary(paths, run, commit)


def archive_run(layout: GraphPaths, paths: RunPaths, skill: str) -> None:
    """Do the second half: archive a merged run's records, remove its folder, collect garbage.

    If it is interrupted, `recover_graph` completes it at the next start.
    """
    if not paths.folder.is_dir():
        return
    store = ExpertStore(layout)
    run = _read_own_run(paths, skill)
    if run.run_id in store.manifest().merged:
        comparisons.clear(layout, run.run_id)
        _move_to_archive(paths, layout.archive(paths.expert, skill))
        store.collect_garbage(pinned_versions(layout))


def recover_graph(
    layout: GraphPaths, rule: MergeRule | None = None, *, min_success_rate: float = 0.0
) -> Recovery:
    """Merge every finished run, and remove what a kill or a power cut left behind.

    Left to the scheduler are runs with a living process, without a result, or whose experts are
    being compared, and unmerged runs that succeeded less often than `min_success_rate`. No other
    process may prepare or merge runs of this graph meanwhile.

    Raises:
      FileRefusedError: the manifest is damaged; says which history file to restore.
    """
    refuse_misplaced(layout)
    ExpertStore(layout).recover(pinned_versions(layout))
    for folder in (layout.training_runs, layout.failed_runs):
        storage.remove_leftovers(folder)
    remove_part_files(layout)
    comparisons.remove_stale(layout, _live_run_ids(layout))
    merged: list[dict[str, Any]] = []
    refused: dict[Path, str] = {}
    for paths in live_runs(layout):
        if lock_held(paths.folder) or not paths.result_json.exists():
            continue
        try:
            if summary := _process_if_due(layout, paths, rule, min_success_rate):
                merged.append(summary)
        except BusyError as error:  # the scheduler tries again
            logger.info("%s", error)
        except (ResultRefusedError, FileRefusedError, ExpertError) as error:
            logger.warning("a finished run is refused", extra={"why": str(error)})
            refused[paths.folder] = str(error)
    return Recovery(merged=tuple(merged), refused=refused)


def _live_run_ids(layout: GraphPaths) -> set[str]:
    """The ids of all live runs whose records can be read."""
    found: set[str] = set()
    for paths in live_runs(layout):
        with suppress(FileRefusedError):
            found.add(read_run(paths).run_id)
    return found


def _process_if_due(
    layout: GraphPaths, paths: RunPaths, rule: MergeRule | None, min_success_rate: float
) -> dict[str, Any] | None:
    """Process a run that is merged already or succeeded often enough."""
    run = read_run(paths)
    merged = run.run_id in ExpertStore(layout).manifest().merged
    if not merged and read_result(paths).success_rate < min_success_rate:
        return None
    return process_completed_training(
        paths.folder,
        run.skill,
        paths.expert,
        layout.root,
        frame_accounting=run.config.get("frame_accounting", "acted"),
        merge_policy=rule,
    )


def _read_own_run(paths: RunPaths, skill: str) -> TrainingRun:
    """Read run.json; refuse it if it is of another expert or skill than the call."""
    run = read_run(paths)
    if (run.expert, run.skill) != (paths.expert, skill):
        raise ResultRefusedError(
            f"{paths.run_json} is of another run than the call\n"
            f"- expert {paths.expert} ({skill})\n+ expert {run.expert} ({run.skill})"
        )
    return run


def _commit(
    store: ExpertStore,
    paths: RunPaths,
    run: TrainingRun,
    *,
    candidates: Sequence[Candidate],
    rule: MergeRule,
) -> Commit:
    """Merge, after the rule's questions are answered; no lock is held until then."""
    questions = store.questions(run.run_id, candidates, rule=rule)
    evidence = comparisons.evidence(store.layout, paths, run, questions) if questions else {}
    storage.fault_point("merge.informed")
    commit = store.commit(run.run_id, candidates, rule=rule, evidence=evidence)
    logger.debug("merged", extra={"run_id": run.run_id, "generation": commit.manifest.generation})
    return commit


def _move_to_archive(paths: RunPaths, archive: RunPaths) -> None:
    """Archive a merged run's records, then remove its folder."""
    storage.fault_point("merge.committed")
    storage.make_dir(archive.folder)
    for source, target in zip(paths.tracker_folders, archive.tracker_folders, strict=True):
        _archive_folder(source, target)
    for source, target in zip(paths.records, archive.records, strict=True):
        if source.exists():
            storage.copy_file(source, target)
        else:
            storage.remove_file(target)  # of an earlier run of the skill
    storage.fault_point("merge.archived")
    storage.remove_tree(paths.folder)
    storage.fault_point("merge.removed")


def _archive_folder(source: Path, target: Path) -> None:
    """Replace `target` by a copy of `source`; links and special files are left out."""
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


def _archived_summary(archive: RunPaths, manifest: Manifest, paths: RunPaths) -> dict[str, Any]:
    """The summary of a run whose folder is gone because it was merged."""
    if archive.run_json.exists():
        run = read_run(archive)
        if run.run_id in manifest.merged:
            commit = Commit(manifest=manifest, decisions={}, already_merged=True)
            return _summary(archive, run, commit)
    raise FileRefusedError(
        f"{paths.folder} does not exist and {archive.folder} holds no merged run; train the skill"
    )


def _summary(paths: RunPaths, run: TrainingRun, commit: Commit) -> dict[str, Any]:
    result = read_result(paths)
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
    """The decision of an earlier merge, from the lineage of the version that counts now."""
    version = commit.manifest.experts[expert]
    if any(entry.run_id == run.run_id for entry in version.lineage):
        return UseCandidate(frames=version.frames, why="merged before")
    return KeepCurrent(why="merged before, not in today's version")
