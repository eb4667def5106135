"""`flowrl logs`: the newest training log of a skill."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from flowrl.errors import FileRefusedError
from flowrl.layout import GraphLayout
from flowrl.report.snapshot import SkillRow, find_row, read_rows

_POLL_SECONDS = 0.2


def show(graph_path: Path, skill: str, *, follow: bool) -> int:
    """Print the log, line by line as a terminal would show it."""
    layout = GraphLayout(graph_path)
    row = find_row(read_rows(layout), skill, graph_path)
    path = newest_log(layout, row)
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        for line in file:
            sys.stdout.write(as_shown(line))
        while follow and _still_running(layout, row):
            _drain(file)
            time.sleep(_POLL_SECONDS)
        _drain(file)
    return 0


def newest_log(layout: GraphLayout, row: SkillRow) -> Path:
    """The live run's log, else the archived one, else the last failed attempt's.

    Raises:
      FileRefusedError: the skill has not been started yet.
    """
    for path in _candidates(layout, row):
        if path.is_file() and not path.is_symlink():
            return path
    raise FileRefusedError(f"{row.skill} has no training log yet: it is {row.status}")


def as_shown(line: str) -> str:
    r"""The line without what a progress bar overwrote.

    >>> as_shown("10 %\r20 %\r30 %\n")
    '30 %\n'
    """
    return line.rstrip("\r\n").rpartition("\r")[2] + "\n"


def _candidates(layout: GraphLayout, row: SkillRow) -> Iterator[Path]:
    if row.expert is None:
        return
    yield layout.run(row.expert, row.skill).training_log
    yield layout.skill_folder(row.expert, row.skill) / "training.log"
    stem = layout.failed_run(row.expert, row.skill, 0).name.removesuffix("0")
    failed = layout.failed_runs.glob(f"{stem}*/training.log")
    yield from sorted(failed, key=lambda path: path.stat().st_mtime, reverse=True)


def _still_running(layout: GraphLayout, row: SkillRow) -> bool:
    rows = {other.skill: other for other in read_rows(layout)}
    return rows[row.skill].status == "running"


def _drain(file: TextIO) -> None:
    sys.stdout.write(file.read().replace("\r\n", "\n"))
    sys.stdout.flush()
