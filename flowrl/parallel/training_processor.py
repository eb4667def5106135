"""Check a finished run, merge its experts, archive its records, remove its folder: exactly once.

The order is: verify, commit (one swap of the manifest, which also records the run id), archive,
remove the folder. The scheduler starts the dependants after the commit. After a kill at any point
the same call leads to the same end; `recover_graph` makes it for every run at start.
"""

from __future__ import annotations

import logging
import math
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl import storage
from flowrl.config import FrameAccounting
from flowrl.errors import (
    BusyError,
    ConfigError,
    ExpertCorruptError,
    ExpertError,
    FileRefusedError,
    ResultRefusedError,
)
from flowrl.experts import array_check
from flowrl.experts.array_check import ArrayReport
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
from flowrl.parallel.training_setup import expected_shapes
from flowrl.paths import GraphPaths, RunPaths
from flowrl.runs import (
    ExpertReport,
    Remapping,
    RunResult,
    Shapes,
    TrainingRun,
    read_result,
    read_run,
)
from flowrl.storage import plain_files

logger = logging.getLogger(__name__)
_BYTES_PER_NUMBER = 4
_SPARE_BYTES = 2**24  # for the files of a checkpoint that hold no arrays


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


def verified_candidates(
    paths: RunPaths, run: TrainingRun, accounting: FrameAccounting = "acted"
) -> tuple[Candidate, ...]:
    """Check a run's result and its experts, and return them as candidates of the merge.

    A child process reads the arrays; the trainer's own report of them is only compared with that.

    Raises:
      ResultRefusedError: with a line `- expected` and a line `+ found` for every difference.
      BusyError: the arrays could not be read just now.
    """
    try:
        result = read_result(paths)
        expected = expected_shapes(run.config)
    except (FileRefusedError, ConfigError, KeyError, TypeError) as error:
        raise _refused(paths, run, [f"  {error}"]) from error
    _refuse(paths, run, _result_differences(paths, run, result, expected))
    local = Remapping(run.experts).global_to_local
    reports = {paths.final(local[report.expert]): report for report in result.experts}
    _refuse(paths, run, _folder_differences(paths, reports))
    _refuse(paths, run, _digest_differences(reports))
    try:
        found = array_check.read_arrays(list(reports), expected)
    except ExpertCorruptError as error:
        raise _refused(paths, run, [f"  {error}"]) from error
    arrays = dict(zip(reports, found, strict=True))
    _refuse(paths, run, (x for f in reports for x in _array_differences(reports[f], arrays[f])))
    ancestors = {ancestor.index: ancestor for ancestor in run.ancestors}
    return tuple(
        Candidate(
            expert=report.expert,
            skill=ancestors[report.expert].skill if report.expert in ancestors else run.skill,
            ancestor=ancestors.get(report.expert),
            gained=report.acted if accounting == "acted" else result.frames,
            sha256=report.sha256,
            shapes=report.shapes,
            content=arrays[folder].content,
            folder=folder,
        )
        for folder, report in reports.items()
    )


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
        storage.copy_tree(source, prepared, left_out=left_out)
    except (FileRefusedError, FileNotFoundError, PermissionError) as error:
        logger.warning("%s is not archived: %s", source, error)
        storage.remove_tree(prepared)
        return
    storage.commit_dir(prepared, target)
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
        return UseCandidate(why="merged before")
    return KeepCurrent(why="merged before, not in today's version")


def _refuse(paths: RunPaths, run: TrainingRun, differences: Iterable[str]) -> None:
    """Raise ResultRefusedError if there are any differences."""
    if lines := list(differences):
        raise _refused(paths, run, lines)


def _refused(paths: RunPaths, run: TrainingRun, lines: list[str]) -> ResultRefusedError:
    heading = (
        f"run {run.run_id} of {run.skill!r} in {paths.folder}: keep the folder for reading and "
        "train the skill again"
    )
    return ResultRefusedError("\n".join([heading, *lines]))


def _differ(name: str, expected: Any, found: Any) -> Iterator[str]:
    if expected != found:
        yield f"- {name} {expected}"
        yield f"+ {name} {found}"


def _shapes_differ(expert: int, expected: Shapes, found: Shapes) -> Iterator[str]:
    for leaf in sorted({*expected, *found}):
        name = f"expert {expert} {leaf}"
        yield from _differ(name, expected.get(leaf, "absent"), found.get(leaf, "absent"))


def _result_differences(
    paths: RunPaths, run: TrainingRun, result: RunResult, expected: Shapes
) -> Iterator[str]:
    dependencies = [expert for expert in run.experts if expert != run.expert]
    acted = sum(report.acted for report in result.experts)
    yield from _differ("run id", run.run_id, result.run_id)
    yield from _differ("experts", list(run.experts), sorted(r.expert for r in result.experts))
    yield from _differ("ancestors", dependencies, sorted(a.index for a in run.ancestors))
    for ancestor in run.ancestors:
        lineage = sum(entry.frames for entry in ancestor.lineage)
        yield from _differ(f"frames of ancestor {ancestor.index}", ancestor.frames, lineage)
    yield from _differ("acted steps, over all experts,", result.frames, acted)
    yield from _differ("steps of the plan", len(run.plan), len(result.step_success))
    for path in paths.records:
        if path.is_symlink() or (path.exists() and not stat.S_ISREG(path.lstat().st_mode)):
            yield from _differ(path.name, "a plain file", "a link or a special file")
    for report in result.experts:
        yield from _shapes_differ(report.expert, expected, report.shapes)


def _folder_differences(paths: RunPaths, reports: Mapping[Path, ExpertReport]) -> Iterator[str]:
    """Differences that keep the experts' files from being read at all."""
    for folder in (paths.policies, paths.finals):
        if folder.is_symlink() or not folder.is_dir():
            yield f"  {folder} is not a folder"
            return
    names = sorted(folder.name for folder in reports)
    yield from _differ("folders", names, sorted(path.name for path in paths.finals.iterdir()))
    for folder, report in reports.items():
        numbers = sum(math.prod(shape) for shape in report.shapes.values())
        most = _SPARE_BYTES + _BYTES_PER_NUMBER * numbers
        try:
            size = sum(path.lstat().st_size for path in plain_files(folder))
        except FileRefusedError as error:
            yield f"  {error}"
        else:
            if size > most:
                yield f"  {folder} has {size} bytes, over {most}"


def _digest_differences(reports: Mapping[Path, ExpertReport]) -> Iterator[str]:
    for folder, report in reports.items():
        try:
            found = storage.tree_digest(folder)
        except FileRefusedError as error:
            yield f"  {error}"
        else:
            yield from _differ(f"expert {report.expert} sha256", report.sha256, found)


def _array_differences(report: ExpertReport, arrays: ArrayReport) -> Iterator[str]:
    expert = f"expert {report.expert}"
    if arrays.unreadable:
        yield f"  {expert} cannot be read: {arrays.unreadable}"
    for leaf, wanted, found in arrays.differences:
        yield from _differ(f"{expert} {leaf}", wanted, found)
    if arrays.content:
        yield from _differ(f"{expert} content", report.content, arrays.content)
