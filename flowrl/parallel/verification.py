"""Is what a run left behind what it was asked for, and whole? Nothing is merged before."""

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
_SPARE_BYTES = 2**24  # for what else an expert's files hold
REMEDY = "keep the folder for reading and train the skill again"


def records(layout: RunPaths) -> tuple[Path, ...]:
    """The files of a run that are kept for good, run.json last; some may not exist."""
    return (
        layout.module,
        layout.training_log,
        layout.older_training_log,
        layout.metrics,
        layout.result_json,
        layout.run_json,
    )


def tracker_folders(layout: RunPaths) -> tuple[Path, ...]:
    """The folders of other programs that are kept for good as far as they can be."""
    return (layout.tensorboard, layout.wandb)


def verified_candidates(
    layout: RunPaths, run: TrainingRun, accounting: FrameAccounting = "acted"
) -> tuple[RunResult, tuple[Candidate, ...]]:
    """Check a run's result and its experts, and return them as candidates of the merge.

    What the trainer says of its arrays is believed only after a child has read them.

    Raises:
      ResultRefusedError: with a line `- wanted` and a line `+ found` for every difference.
      BusyError: the arrays could not be read just now.
    """
    try:
        result = read_result(layout)
        wanted = expected_shapes(run.config)
    except (FileRefusedError, ConfigError, KeyError, TypeError) as error:
        raise _refused(layout, run, [f"  {error}"]) from error
    differences = [*_differences(run, result), *_bad_files(layout)]
    for report in result.experts:
        differences += _shape_differences(report, wanted)
    if not differences:
        differences = list(_misplaced(layout, run, result.experts))
    if differences:
        raise _refused(layout, run, differences)
    local = Remapping(run.experts).global_to_local
    folders = [layout.final(local[report.expert]) for report in result.experts]
    found = _read_arrays(layout, run, dict(zip(folders, result.experts, strict=True)), wanted)
    for report, arrays in zip(result.experts, found, strict=True):
        differences += _array_differences(report, arrays)
    if differences:
        raise _refused(layout, run, differences)
    ancestors = {ancestor.index: ancestor for ancestor in run.ancestors}
    return result, tuple(
        Candidate(
            expert=report.expert,
            skill=ancestors[report.expert].skill if report.expert in ancestors else run.skill,
            ancestor=ancestors.get(report.expert),
            acted=report.acted,
            total=result.frames,
            sha256=report.sha256,
            arrays=arrays,
            folder=folder,
            accounting=accounting,
        )
        for folder, report, arrays in zip(folders, result.experts, found, strict=True)
    )


def _refused(layout: RunPaths, run: TrainingRun, lines: Iterable[str]) -> ResultRefusedError:
    return ResultRefusedError(
        "\n".join([f"run {run.run_id} of {run.skill!r} in {layout.folder}: {REMEDY}", *lines])
    )


def _differences(run: TrainingRun, result: RunResult) -> Iterator[str]:
    dependencies = [expert for expert in run.experts if expert != run.expert]
    acted = sum(report.acted for report in result.experts)
    figures = (result.mean_episode_length, result.wall_seconds)
    yield from _differ("run id", run.run_id, result.run_id)
    yield from _differ("experts", list(run.experts), sorted(r.expert for r in result.experts))
    yield from _differ("ancestors", dependencies, sorted(a.index for a in run.ancestors))
    for ancestor in run.ancestors:
        lineage = sum(entry.frames for entry in ancestor.lineage)
        yield from _differ(f"frames of ancestor {ancestor.index}", ancestor.frames, lineage)
    yield from _differ("acted steps, over all experts,", result.frames, acted)
    yield from _differ("steps of the plan", len(run.plan), len(result.step_success))
    yield from _differ("finite figures", True, all(math.isfinite(figure) for figure in figures))


def _differ(what: str, wanted: Any, found: Any) -> Iterator[str]:
    if wanted != found:
        yield f"- {what} {wanted}"
        yield f"+ {what} {found}"


def _bad_files(layout: RunPaths) -> Iterator[str]:
    for path in records(layout):
        if path.is_symlink() or (path.exists() and not stat.S_ISREG(path.lstat().st_mode)):
            yield from _differ(path.name, "a plain file", "a link or a special file")


def _shape_differences(report: ExpertReport, wanted: Shapes) -> Iterator[str]:
    for leaf in sorted({*report.shapes, *wanted}):
        place = f"expert {report.expert} {leaf}"
        yield from _differ(place, wanted.get(leaf, "absent"), report.shapes.get(leaf, "absent"))


def _misplaced(
    layout: RunPaths, run: TrainingRun, reports: Iterable[ExpertReport]
) -> Iterator[str]:
    """What keeps the experts' files from being read at all."""
    for folder in (layout.policies, layout.finals):
        if folder.is_symlink() or not folder.is_dir():
            yield f"  {folder} is not a folder"
            return
    local = Remapping(run.experts).global_to_local
    folders = sorted(layout.final(number).name for number in local.values())
    yield from _differ("folders", folders, sorted(path.name for path in layout.finals.iterdir()))
    for report in reports:
        try:
            _check_size(layout.final(local[report.expert]), report.shapes)
        except FileRefusedError as error:
            yield f"  {error}"


def _check_size(place: Path, shapes: Shapes) -> None:
    """Raise FileRefusedError when an expert's files are far larger than its arrays."""
    most = _SPARE_BYTES + _BYTES_PER_NUMBER * sum(math.prod(shape) for shape in shapes.values())
    size = sum(path.lstat().st_size for path in plain_files(place))
    if size > most:
        raise FileRefusedError(f"{place} has {size} bytes, over {most}")


def _read_arrays(
    layout: RunPaths, run: TrainingRun, reports: Mapping[Path, ExpertReport], expected: Shapes
) -> tuple[ArrayReport, ...]:
    """Read the arrays in each folder, once its files have the digest that the run reports."""
    differences: list[str] = []
    for folder, report in reports.items():
        try:
            found = storage.tree_digest(folder)
        except FileRefusedError as error:
            differences.append(f"  {error}")
        else:
            differences += _differ(f"expert {report.expert} sha256", report.sha256, found)
    if differences:
        raise _refused(layout, run, differences)
    try:
        return array_check.read_arrays(list(reports), expected)
    except ExpertCorruptError as error:
        raise _refused(layout, run, [f"  {error}"]) from error


def _array_differences(report: ExpertReport, found: ArrayReport) -> Iterator[str]:
    expert = f"expert {report.expert}"
    if found.unreadable:
        yield f"  {expert} cannot be read: {found.unreadable}"
        return
    if found.shapes != report.shapes:
        for leaf in sorted({*found.shapes, *report.shapes}):
            wanted, shape = report.shapes.get(leaf, "absent"), found.shapes.get(leaf, "absent")
            yield from _differ(f"{expert} {leaf}", wanted, shape)
    for leaf, dtype in sorted(found.dtypes.items()):
        yield from _differ(f"{expert} {leaf} of dtype", array_check.FLOAT, dtype)
    for leaf in found.not_finite:
        yield from _differ(f"{expert} {leaf}", "finite", "NaN or infinite")
    if found.content:
        yield from _differ(f"{expert} content", report.content, found.content)
