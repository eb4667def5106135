"""Run folders after they were made: launched again, failed, or pinning what they started from."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flowrl import storage
from flowrl.errors import BusyError, FileRefusedError
from flowrl.launchers import spec
from flowrl.launchers.files import becomes_free, lock_held
from flowrl.paths import GraphPaths, RunPaths
from flowrl.runs import TrainingRun, read_run

logger = logging.getLogger(__name__)
KEPT_FAILURES = 5
_RUN_FOLDER = re.compile(r"skill_(0|[1-9][0-9]*)_[A-Za-z0-9_]+")
_ATTEMPT = re.compile(r"\.attempt([0-9]+)(?:\.([0-9]+))?")


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
        """The generated module, which the trainer is given."""
        return self.layout.module

    @property
    def policies_folder(self) -> Path:
        """Where seeds are and final experts go."""
        return self.layout.policies

    def __iter__(self) -> Iterator[Path]:
        """The documented triple."""
        return iter((self.run_folder, self.module_path, self.policies_folder))


def is_run_folder(name: str) -> bool:
    """Whether a folder name is one that a live run's folder can have.

    >>> is_run_folder("skill_7_Place_Table"), is_run_folder("skill_07_Place_Table")
    (True, False)
    """
    return _RUN_FOLDER.fullmatch(name) is not None


def live_runs(layout: GraphPaths) -> Iterator[RunPaths]:
    """Every run folder that was neither merged nor failed, by name."""
    if not layout.training_runs.is_dir():
        return
    for path in sorted(layout.training_runs.iterdir()):
        found = _RUN_FOLDER.fullmatch(path.name)
        if found is not None and path.is_dir() and not path.is_symlink():
            yield RunPaths(path, int(found[1]))


def pinned_versions(layout: GraphPaths) -> frozenset[tuple[int, str]] | None:
    """The (index, version) of everything that a live run started from: it is not garbage.

    None says that a run's record is damaged: nobody knows what it pins, so nothing is garbage.
    """
    pinned: set[tuple[int, str]] = set()
    for run_layout in live_runs(layout):
        try:
            ancestors = read_run(run_layout).ancestors
        except FileRefusedError as error:
            logger.warning("no version is collected: %s", error)
            return None
        pinned.update((ancestor.index, ancestor.version) for ancestor in ancestors)
    return frozenset(pinned)


def sweep_parts(layout: GraphPaths) -> None:
    """Remove the half-written files that dead writers left anywhere in the graph."""
    rooms = sorted(path for path in layout.root.iterdir() if not path.is_symlink())
    dead = (place.folder for place in live_runs(layout) if not lock_held(place.folder))
    for folder in (layout.root, *rooms, *dead):
        storage.remove_part_files(folder)


def resume_training_run(layout: GraphPaths, expert: int, skill: str) -> PreparedRun:
    """Make the same attempt ready to be launched again; its checkpoints and log stay.

    Raises:
      BusyError: a process of this run still lives.
      FileRefusedError: there is no such run folder, or its run.json is of another run.
    """
    place = layout.run(expert, skill)
    run = read_run(place)
    if (run.expert, run.skill) != (expert, skill):
        raise FileRefusedError(
            f"{place.run_json} is of expert {run.expert} ({run.skill}), not of expert {expert} "
            f"({skill}); retry the skill"
        )
    refuse_living(place)
    for left in (place.start_json, place.exit_json, place.result_json):
        storage.remove_file(left)
    return PreparedRun(layout=place, run=run)


def refuse_living(place: RunPaths) -> None:
    """Raise BusyError when a process of the run in this folder still lives."""
    if lock_held(place.folder):
        raise BusyError(f"{place.lock} is held: a process of this run lives; wait or cancel it")


def fail_run(
    layout: GraphPaths, expert: int, skill: str, attempt: int | None = None
) -> Path | None:
    """Move a run folder to `training_runs/failed/`; returns its new place, None without one.

    The attempt is read from run.json when it is not said. The newest failures of each skill are
    kept for reading.

    Raises:
      BusyError: a process of this run still lives; the folder stays where it is.
    """
    place = layout.run(expert, skill)
    if not place.folder.is_dir():
        return None
    if not becomes_free(place.folder):  # a runner that has recorded the end is still ending
        refuse_living(place)
    number = _attempt(place) if attempt is None else attempt
    stem = layout.failed_run(expert, skill, 0).name.removesuffix(".attempt0")
    failures = _failures(layout, stem)
    newest = max(failures, default=(0, -1))
    series = newest[0] if (newest[0], number) > newest else newest[0] + 1
    target = layout.failed_run(expert, skill, number)
    if series:  # attempts began anew after a retry by hand
        target = target.with_name(f"{target.name}.{series}")
    storage.move_dir(place.folder, target)
    failures[series, number] = target
    for key in sorted(failures)[:-KEPT_FAILURES]:
        storage.remove_tree(failures[key])
    return target


def remove_strays(layout: GraphPaths, expert: int, skill: str) -> None:
    """Remove this skill's folders of other numbers, which nobody has ever launched.

    A daemon made them that was killed before it had saved the number it gave the skill.
    """
    own = layout.run(expert, skill).folder.name.removeprefix(f"skill_{expert}")
    for place in live_runs(layout):
        never_launched = spec.is_missing(place.folder) and not os.path.lexists(place.lock)
        named = place.folder.name == f"skill_{place.expert}{own}"
        if named and place.expert != expert and never_launched:
            storage.remove_tree(place.folder)


def _attempt(place: RunPaths) -> int:
    try:
        return read_run(place).attempt
    except FileRefusedError:
        return 0


def _failures(layout: GraphPaths, stem: str) -> dict[tuple[int, int], Path]:
    """A skill's failed attempts by (series, attempt), which is the order they failed in."""
    found: dict[tuple[int, int], Path] = {}
    for path in layout.failed_runs.glob(f"{stem}.attempt*"):
        parts = _ATTEMPT.fullmatch(path.name.removeprefix(stem))
        if parts is not None:
            found[int(parts[2] or 0), int(parts[1])] = path
    return found
