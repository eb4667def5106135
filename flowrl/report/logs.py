"""`flowrl logs`: the newest training log of a skill."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from flowrl.errors import FileRefusedError
from flowrl.layout import GraphLayout
from flowrl.report.snapshot import SkillRow, find_row, read_rows

_POLL_SECONDS = 0.2
_PIECE = re.compile(r"\n|\r|\x1b\[[0-9;?]*[A-Za-z]|[^\n\r\x1b]+|\x1b")
_UP = re.compile(r"\x1b\[(\d*)A")


def show(graph_path: Path, skill: str, *, follow: bool) -> int:
    """Print the log as a terminal would show it in the end, and then what is added to it."""
    layout = GraphLayout(graph_path)
    row = find_row(read_rows(layout), skill, graph_path)
    path = newest_log(layout, row)
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        sys.stdout.write(as_shown(file.read()))
        while follow and _still_running(layout, row):
            _pass_on(file)
            time.sleep(_POLL_SECONDS)
        if follow:
            _pass_on(file)
    return 0


def newest_log(layout: GraphLayout, row: SkillRow) -> Path:
    """The live run's log, else the archived one, else the last failed attempt's.

    Raises:
      FileRefusedError: the skill has no log yet.
    """
    for path in _candidates(layout, row):
        if path.is_file() and not path.is_symlink():
            return path
    raise FileRefusedError(f"{row.skill} has no training log: it is {row.status}")


def as_shown(text: str) -> str:
    r"""What stands on a terminal in the end: without colours and what was drawn over.

    Understands what progress displays use: carriage return, erase line, cursor up.

    >>> as_shown("10 %\r20 %\n\x1b[1A\x1b[2K\x1b[32m30 %\x1b[0m\n")
    '30 %\n'
    """
    lines, row, overwrite = [""], 0, False
    for piece in _PIECE.findall(text):
        if piece == "\n":
            row, overwrite = row + 1, False
            if row == len(lines):
                lines.append("")
        elif piece == "\r":
            overwrite = True
        elif piece.endswith("K") and piece[0] == "\x1b":
            lines[row] = ""
        elif up := _UP.fullmatch(piece):
            row = max(0, row - int(up[1] or 1))
        elif piece[0] != "\x1b":
            lines[row] = piece if overwrite else lines[row] + piece
            overwrite = False
    return "\n".join(lines)


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


def _pass_on(file: TextIO) -> None:
    """What was added since: as it is for a terminal, which knows how to draw it."""
    added = file.read()
    if added:
        sys.stdout.write(added if sys.stdout.isatty() else as_shown(added))
        sys.stdout.flush()
