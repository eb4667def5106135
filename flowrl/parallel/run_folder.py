"""Find, resume and fail run folders; list the expert versions that live runs started from."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flowrl import storage
from flowrl.errors import BusyError, FileRefusedError, FormatVersionError
from flowrl.launchers.run_status import becomes_free, lock_held
from flowrl.paths import GraphPaths, RunPaths
from flowrl.runs import TrainingRun, read_run

logger = logging.getLogger(__name__)
KEPT_FAILURES = 5
_RUN_FOLDER = re.compile(r"skill_(0|[1-9][0-9]*)_[A-Za-z0-9_]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRun:
    """A run that can be launched; unpacks as `(run_folder, module_path, policies_folder)`."""

    layout: RunPaths
    run: TrainingRun

    @property
    def run_folder(self) -> Path:
        """The folder of the run."""
        return self.layout.folder

    @property
    def module_path(self) -> Path:
        """The generated module; the trainer's `--module_path`."""
        return self.layout.module

    def __iter__(self) -> Iterator[Path]:
        """The documented triple."""
        return iter((self.layout.folder, self.layout.module, self.layout.policies))


def live_runs(layout: GraphPaths) -> Iterator[RunPaths]:
    """The run folders of the graph that are neither merged nor failed, sorted by name."""
    if not layout.training_runs.is_dir():
        return
    for path in sorted(layout.training_runs.iterdir()):
        found = _RUN_FOLDER.fullmatch(path.name)
        if found is not None and path.is_dir() and not path.is_symlink():
            yield RunPaths(path, int(found[1]))


def readable_runs(layout: GraphPaths) -> Iterator[tuple[RunPaths, TrainingRun]]:
    """The live runs with their records, but for those whose record is damaged.

    Raises:
      FormatVersionError: another version of flowrl wrote a record.
    """
    for paths in live_runs(layout):
        try:
            yield paths, read_run(paths)
        except FormatVersionError:
            raise
        except FileRefusedError as error:
            logger.error("%s; its skill begins a new run", error)


def pinned_versions(layout: GraphPaths) -> frozenset[tuple[int, str]] | None:
    """The (index, version) of every expert that a live run started from; these are not garbage.

    None means that a run's record is damaged, so that no version can be told to be garbage.
    """
    pinned: set[tuple[int, str]] = set()
    for paths in live_runs(layout):
        try:
            ancestors = read_run(paths).ancestors
        except FileRefusedError as error:
            logger.warning("no version is collected: %s", error)
            return None
        pinned.update((version.index, version.version) for version in ancestors)
    return frozenset(pinned)


def remove_part_files(layout: GraphPaths) -> None:
    """Remove the half-written files that dead writers left anywhere in the graph."""
    folders = sorted(path for path in layout.root.iterdir() if not path.is_symlink())
    dead = (paths.folder for paths in live_runs(layout) if not lock_held(paths.folder))
    for folder in (layout.root, *folders, *dead):
        storage.remove_part_files(folder)


def open_training_run(layout: GraphPaths, expert: int, skill: str) -> PreparedRun:
    """Return a run folder as it is.

    Raises:
      FileRefusedError: there is no such run folder, or its run.json is of another run.
    """
    paths = layout.run(expert, skill)
    return PreparedRun(layout=paths, run=read_own_run(paths, skill))


def read_own_run(paths: RunPaths, skill: str) -> TrainingRun:
    """Read run.json.

    Raises:
      FileRefusedError: it is missing, damaged, or of another expert or skill.
    """
    run = read_run(paths)
    if (run.expert, run.skill) != (paths.expert, skill):
        raise FileRefusedError(
            f"{paths.run_json} is of expert {run.expert} ({run.skill}), not of expert "
            f"{paths.expert} ({skill}); retry the skill"
        )
    return run


def resume_training_run(layout: GraphPaths, expert: int, skill: str) -> PreparedRun:
    """Make the same attempt ready to launch again; its checkpoints and log stay.

    Raises:
      BusyError: a process of this run still lives.
      FileRefusedError: as `open_training_run`.
    """
    prepared = open_training_run(layout, expert, skill)
    clear_for_launch(prepared.layout)
    return prepared


def clear_for_launch(paths: RunPaths) -> None:
    """Remove what the last launch of a run recorded; raises BusyError if a process of it lives."""
    refuse_live_process(paths)
    records = (paths.start_json, paths.exit_json, paths.result_json, paths.progress)
    for record in (*records, paths.prune_json):
        storage.remove_file(record)


def refuse_live_process(paths: RunPaths) -> None:
    """Raise BusyError if a process of the run in this folder still lives."""
    if lock_held(paths.folder):
        raise BusyError(f"{paths.lock} is held: a process of this run lives; wait or cancel it")


def fail_run(layout: GraphPaths, expert: int, skill: str) -> Path | None:
    """Move a run folder to `training_runs/failed/`; returns its new path, None without a folder.

    The newest failures of each skill are kept for reading.

    Raises:
      BusyError: a process of this run still lives; the folder stays where it is.
    """
    paths = layout.run(expert, skill)
    if not paths.folder.is_dir():
        return None
    if not becomes_free(paths.folder):  # a runner that has recorded the end is still ending
        refuse_live_process(paths)
    try:
        target = layout.failed_run(expert, skill, read_run(paths).attempt)
    except FileRefusedError:
        target = layout.failed_run(expert, skill, 0)
    storage.remove_tree(target)  # attempts are counted from 1 again when the state is made anew
    storage.move_dir(paths.folder, target)
    failures = layout.failed_runs.glob(f"{target.name.rpartition('.')[0]}.attempt*")
    for path in sorted(failures, key=lambda path: path.stat().st_mtime)[:-KEPT_FAILURES]:
        storage.remove_tree(path)
    return target
