"""Check a finished run, merge its experts, archive its records, remove its folder: exactly once.

The order is: verify, commit (one swap of the manifest, which also records the run id), archive,
remove the folder. The scheduler starts the dependants after the commit. After a kill at any point
the same call leads to the same end; `recover_graph` archives what was merged before a start.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from flowrl import config as configs
from flowrl import storage
from flowrl.config import FrameAccounting, PPOConfig
from flowrl.errors import (
    BusyError,
    ConfigError,
    ExpertCorruptError,
    ExpertError,
    FileRefusedError,
    ResultRefusedError,
)
from flowrl.experts import array_check, repair
from flowrl.experts.array_check import ArrayReport
from flowrl.experts.manifest import KEPT_GENERATIONS, Manifest, generations
from flowrl.experts.merge import Candidate, MergeDecision, MergeRule, UseCandidate, frame_count
from flowrl.experts.store import Commit, ExpertStore, refuse_misplaced
from flowrl.launchers.run_status import lock_held
from flowrl.launchers.sandbox import Confinement
from flowrl.parallel import comparisons
from flowrl.parallel.training_setup import (
    expected_shapes,
    live_runs,
    pinned_versions,
    read_own_run,
    remove_part_files,
)
from flowrl.paths import GraphPaths, RunPaths
from flowrl.runs import (
    ExpertReport,
    ExpertVersion,
    Remapping,
    RunResult,
    Shapes,
    TrainingRun,
    read_result,
    read_run,
)
from flowrl.storage import plain_files

EARLY = "--analyse_at"  # the origin of the goal of a run that ends early, and of what it leaves
logger = logging.getLogger(__name__)
_BYTES_PER_NUMBER = 4
_SMALL_BYTES, _MOST_SMALL_FILES = 64 * 2**20, 20  # what else of a run's files is archived
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
_SPARE_BYTES = 2**24  # for the files of a checkpoint that hold no arrays


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
    `wall_seconds`, `goal`, `budget`, `early`, `taken` and `experts`: by global index, `verdict`
    ("take" or "keep"), `why`, `frames` and `version`.

    Args:
      run_folder: as `prepare_training_run` made it, with the trainer's result.json.
      base_dir: the graph's folder.
      frame_accounting: the frames that the frame rule credits an expert with.
      merge_policy: the rule to merge by (default: the frame rule).

    ResultRefusedError: the result is of another run, incomplete or damaged; nothing has changed.
    FileRefusedError: there is no such run, or the manifest is damaged. BusyError: another process
    merges, or a program answers the rule's questions; try again.
    """
    graph_paths = GraphPaths(Path(base_dir))
    run_paths = RunPaths(Path(run_folder), global_expert_idx)
    rule = merge_policy or frame_count
    store = ExpertStore(graph_paths)
    summary = merge_run(store, run_paths, skill_name, accounting=frame_accounting, rule=rule)
    archive_run(graph_paths, run_paths)
    return summary


def merge_run(
    store: ExpertStore,
    run_paths: RunPaths,
    skill: str,
    *,
    accounting: FrameAccounting,
    rule: MergeRule,
    confinement: Confinement | None = None,
) -> dict[str, Any]:
    """Do the first half of `process_completed_training`: merge the experts, keep the folder."""
    graph_paths = store.graph_paths
    if not run_paths.folder.is_dir():
        return _archived_summary(
            graph_paths.archive(run_paths.expert, skill), store.manifest(), run_paths
        )
    run = read_own_run(run_paths, skill)
    configs.from_json(PPOConfig, run.config)  # refused now, or never
    candidates: tuple[Candidate, ...] = ()
    if run.run_id not in store.manifest().merged:
        candidates = verified_candidates(run_paths, run, accounting)
        storage.fault_point("merge.verified")
    evidence = {}
    if questions := store.questions(run.run_id, candidates, rule=rule):
        evidence = comparisons.evidence(
            graph_paths, run_paths, run, questions, confinement=confinement
        )
    storage.fault_point("merge.informed")
    commit = store.commit(run.run_id, candidates, rule=rule, evidence=evidence)
    return _summary(run_paths, run, commit)


def archive_run(graph_paths: GraphPaths, run_paths: RunPaths) -> None:
    """Do the second half: archive a merged run's records, remove its folder.

    Once in 20 merges it collects old versions. `recover_graph` completes it at the next start.
    FileRefusedError: the folder is not the run's.
    """
    if not run_paths.folder.is_dir():
        return
    store = ExpertStore(graph_paths)
    run = read_run(run_paths)
    if run.run_id in store.manifest().merged:
        own = graph_paths.run(run.expert, run.skill).folder
        if run_paths.folder.name != own.name or read_result(run_paths).run_id != run.run_id:
            raise FileRefusedError(f"{run_paths.folder} is not the folder of run {run.run_id}")
        comparisons.clear(graph_paths.comparisons / run.run_id)
        _move_to_archive(run_paths, graph_paths.archive(run.expert, run.skill))
        if len(generations(graph_paths)) >= 2 * KEPT_GENERATIONS:  # it reads many manifests
            store.collect_garbage(pinned_versions(graph_paths))


def recover_graph(graph_paths: GraphPaths) -> None:
    """Remove what a kill or a power cut left behind, and archive the runs that are merged.

    The scheduler merges the finished ones that are not. No other process may prepare or merge runs
    of this graph meanwhile. FileRefusedError means that the manifest is damaged.
    """
    refuse_misplaced(graph_paths)
    store = ExpertStore(graph_paths)
    store.recover(pinned_versions(graph_paths))
    for folder in (graph_paths.training_runs, graph_paths.failed_runs):
        storage.remove_leftovers(folder)
    remove_part_files(graph_paths)
    for version in store.manifest().experts.values():
        with suppress(ExpertError):  # it is damaged; notices say what came of it
            repair.usable(store, version)
    merged, live = store.manifest().merged, set[str]()
    for run_paths in live_runs(graph_paths):
        try:
            run = read_run(run_paths)
            live.add(run.run_id)
            if run.run_id in merged and not lock_held(run_paths.folder):
                archive_run(graph_paths, run_paths)
        except (FileRefusedError, BusyError) as error:
            logger.warning("a run folder stays: %s", error)
    comparisons.remove_stale(graph_paths, live)


def verified_candidates(
    run_paths: RunPaths, run: TrainingRun, accounting: FrameAccounting = "acted"
) -> tuple[Candidate, ...]:
    """Check a run's result and its experts, and return them as candidates of the merge.

    A child process reads the arrays; the trainer's own report of them is only compared with that.
    ResultRefusedError has a line `- expected` and a line `+ found` for every difference. BusyError
    means that the arrays could not be read just now.
    """
    try:
        result = read_result(run_paths)
        expected = expected_shapes(run.config)
    except (FileRefusedError, ConfigError, KeyError, TypeError) as error:
        raise _refused(run_paths, run, [f"  {error}"]) from error
    _refuse(run_paths, run, _result_differences(run_paths, run, result))
    local = Remapping(run.experts).global_to_local
    reports = {run_paths.final(local[report.expert]): report for report in result.experts}
    _refuse(run_paths, run, _file_differences(run_paths, reports, expected))
    try:
        contents = array_check.read_arrays(list(reports), expected)
    except ExpertCorruptError as error:
        raise _refused(run_paths, run, [f"  {error}"]) from error
    arrays = dict(zip(reports, contents, strict=True))
    _refuse(run_paths, run, (x for f in reports for x in _array_differences(reports[f], arrays[f])))
    ancestors = {ancestor.index: ancestor for ancestor in run.ancestors}
    return tuple(
        Candidate(
            expert=report.expert,
            skill=ancestors[report.expert].skill if report.expert in ancestors else run.skill,
            ancestor=ancestors.get(report.expert),
            gained=report.acted if accounting == "acted" else result.frames,
            sha256=report.sha256,
            shapes=expected,
            content=arrays[folder].content,
            folder=folder,
            success_rate=result.success_rate if report.expert == run.expert else None,
            anew=run.anew and report.expert == run.expert,
        )
        for folder, report in reports.items()
    )


def _move_to_archive(run_paths: RunPaths, archive: RunPaths) -> None:
    """Archive a merged run's records, then remove its folder."""
    storage.fault_point("merge.committed")
    storage.make_dir(archive.folder)
    for source, target in zip(run_paths.tracker_folders, archive.tracker_folders, strict=True):
        _archive_folder(source, target)
    for film in archive.films:
        storage.remove_file(film)  # of an earlier run of the skill
    for source in itertools.islice(_small_files(run_paths, archive), _MOST_SMALL_FILES):
        try:
            storage.copy_file(source, archive.folder / source.name)
        except FileRefusedError as error:
            logger.warning("%s is not archived: %s", source, error)
    for source, target in zip(run_paths.records, archive.records, strict=True):
        if source.exists():
            storage.copy_file(source, target)
        else:
            storage.remove_file(target)  # of an earlier run of the skill
    storage.fault_point("merge.archived")
    storage.remove_tree(run_paths.folder)
    storage.fault_point("merge.removed")


def _small_files(run_paths: RunPaths, archive: RunPaths) -> Iterator[Path]:
    """Return the run's other files, such as video.mp4; a trainer may name them anything."""
    known = {path.name for path in (*run_paths.records, *run_paths.of_the_process)}
    sizes = {path: path.lstat() for path in sorted(run_paths.folder.iterdir())}
    for path, status in sizes.items():
        plain = stat.S_ISREG(status.st_mode) and status.st_size <= _SMALL_BYTES
        free = not path.name.startswith("expert_") and not (archive.folder / path.name).is_dir()
        if plain and free and path.name not in known and _FILE_NAME.fullmatch(path.name):
            yield path


def _archive_folder(source: Path, target: Path) -> None:
    """Replace `target` by a copy of `source`; links and special files are left out."""
    storage.remove_tree(target)  # of a merge that was killed, or an earlier run of the skill
    if not os.path.lexists(source):
        return
    try:
        with storage.building(target) as copy:
            storage.copy_tree(source, copy, left_out=[])
    except (FileRefusedError, FileNotFoundError, PermissionError) as error:
        logger.warning("%s is not archived: %s", source, error)


def _archived_summary(archive: RunPaths, manifest: Manifest, run_paths: RunPaths) -> dict[str, Any]:
    """The summary of a run whose folder is gone because it was merged."""
    if archive.run_json.exists():
        run = read_run(archive)
        if run.run_id in manifest.merged:
            commit = Commit(manifest=manifest, decisions={}, already_merged=True)
            return _summary(archive, run, commit)
    raise FileRefusedError(
        f"{run_paths.folder} does not exist and {archive.folder} holds no merged run; "
        "train the skill"
    )


def _summary(run_paths: RunPaths, run: TrainingRun, commit: Commit) -> dict[str, Any]:
    result, experts = read_result(run_paths), commit.manifest.experts
    summaries = {
        expert: _expert_summary(experts[expert], run, commit.decisions.get(expert))
        for expert in run.experts
        if expert in experts  # a rollback may have taken it out
    }
    return {
        "run_id": run.run_id,
        "skill": run.skill,
        "expert": run.expert,
        "generation": commit.manifest.generation,
        "already_merged": commit.already_merged,
        "frames": result.frames,
        "success_rate": result.success_rate,
        "wall_seconds": result.wall_seconds,
        **completion(run, result),
        "taken": summaries.get(run.expert, {}).get("verdict") != "keep",
        "experts": summaries,
    }


def completion(run: TrainingRun, result: RunResult) -> dict[str, Any]:
    """The facts of `Completed` that a merged run and its result say, besides those of its record.

    The budget is not known (0) of a run that had what another one left. ConfigError: its settings
    cannot be used.
    """
    config = configs.from_json(PPOConfig, run.config)
    goal, budget = config.success_state_rate, config.total_timesteps
    early = run.goal > 0 and result.success_rate >= goal > 0 and result.frames < budget
    known = run.origins.get("total_timesteps") != EARLY
    return {"goal": run.goal or goal, "budget": budget if known else 0, "early": early}


def _expert_summary(
    version: ExpertVersion, run: TrainingRun, decision: MergeDecision | None
) -> dict[str, Any]:
    """Return the fate of an expert; without a decision, from the lineage of an earlier merge."""
    counts = any(entry.run_id == run.run_id for entry in version.lineage)
    taken = isinstance(decision, UseCandidate) if decision else counts
    return {
        "verdict": "take" if taken else "keep",
        "why": decision.why if decision else "merged before",
        "frames": version.frames,
        "version": version.version,
    }


def _refuse(run_paths: RunPaths, run: TrainingRun, differences: Iterable[str]) -> None:
    """Raise ResultRefusedError if there are any differences."""
    if lines := list(differences):
        raise _refused(run_paths, run, lines)


def _refused(run_paths: RunPaths, run: TrainingRun, lines: list[str]) -> ResultRefusedError:
    heading = (
        f"run {run.run_id} of {run.skill!r} in {run_paths.folder}: keep the folder for reading and "
        "train the skill again"
    )
    return ResultRefusedError("\n".join([heading, *lines]))


def _differ(name: str, expected: Any, actual: Any) -> Iterator[str]:
    if expected != actual:
        yield f"- {name} {expected}"
        yield f"+ {name} {actual}"


def _result_differences(run_paths: RunPaths, run: TrainingRun, result: RunResult) -> Iterator[str]:
    seeds = sorted(ancestor.index for ancestor in run.ancestors)
    dependencies = [expert for expert in run.experts if expert != run.expert or expert in seeds]
    acted = sum(report.acted for report in result.experts)
    yield from _differ("run id", run.run_id, result.run_id)
    yield from _differ("experts", list(run.experts), sorted(r.expert for r in result.experts))
    yield from _differ("ancestors", dependencies, seeds)
    if result.kept_update is None or acted > result.frames:
        yield from _differ("acted steps, over all experts,", result.frames, acted)
    yield from _differ("steps of the plan", len(run.plan), len(result.step_success))
    for path in run_paths.records:
        if path.is_symlink() or (path.exists() and not stat.S_ISREG(path.lstat().st_mode)):
            yield from _differ(path.name, "a plain file", "a link or a special file")


def _file_differences(
    run_paths: RunPaths, reports: Mapping[Path, ExpertReport], expected: Shapes
) -> Iterator[str]:
    """Differences in the experts' files, found before any array is read."""
    for folder in (run_paths.policies, run_paths.finals):
        if folder.is_symlink() or not folder.is_dir():
            yield f"  {folder} is not a folder"
            return
    names = sorted(folder.name for folder in reports)
    yield from _differ("folders", names, sorted(path.name for path in run_paths.finals.iterdir()))
    most = _SPARE_BYTES + _BYTES_PER_NUMBER * sum(map(math.prod, expected.values()))
    for folder, report in reports.items():
        try:
            size = sum(path.lstat().st_size for path in plain_files(folder))
            digest = (
                storage.tree_digest(folder) if size <= most else f"of {size} bytes, over {most}"
            )
        except FileRefusedError as error:
            yield f"  {error}"
        else:
            yield from _differ(f"expert {report.expert} sha256", report.sha256, digest)


def _array_differences(report: ExpertReport, arrays: ArrayReport) -> Iterator[str]:
    expert = f"expert {report.expert}"
    if arrays.unreadable:
        yield f"  {expert} cannot be read: {arrays.unreadable}"
    for leaf, wanted, actual in arrays.differences:
        yield from _differ(f"{expert} {leaf}", wanted, actual)
    if arrays.content:
        yield from _differ(f"{expert} content", report.content, arrays.content)
