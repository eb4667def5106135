"""Check what a finished run left behind against run.json, before anything of it is merged."""

from __future__ import annotations

import math
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from flowrl import storage
from flowrl.config import FrameAccounting
from flowrl.errors import ConfigError, ExpertCorruptError, FileRefusedError, ResultRefusedError
from flowrl.experts import array_check
from flowrl.experts.array_check import ArrayReport
from flowrl.experts.merge import Candidate
from flowrl.experts.remapping import Remapping
from flowrl.parallel.training_setup import expected_shapes
from flowrl.paths import RunPaths
from flowrl.runs import ExpertReport, RunResult, Shapes, TrainingRun, read_result
from flowrl.storage import plain_files

_BYTES_PER_NUMBER = 4
_SPARE_BYTES = 2**24  # for the files of a checkpoint that hold no arrays


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
            acted=report.acted,
            total=result.frames,
            sha256=report.sha256,
            shapes=report.shapes,
            arrays=arrays[folder],
            folder=folder,
            accounting=accounting,
        )
        for folder, report in reports.items()
    )


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
