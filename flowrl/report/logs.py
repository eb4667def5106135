"""`flowrl logs`: the newest training log of a skill."""

from __future__ import annotations

import io
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from flowrl.errors import FileRefusedError
from flowrl.paths import GraphPaths
from flowrl.report.snapshot import SkillRow, find_row, read_rows
from flowrl.storage import open_plain

LIMIT_BYTES = 64 * 2**20
_POLL_SECONDS = 0.2
_PIECE = re.compile(r"\n|\r|\x1b\[[0-9;?]*[A-Za-z]|[^\n\r\x1b]+|\x1b")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
# Colours, erasing, cursor moves, hiding the cursor; carriage return and backspace.
_NOT_DRAWN = re.compile(
    r"\x1b(?!\[(?:[0-9;]*[mA-GJK]|\?25[hl]))|[\x00-\x07\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f-\x9f]"
)
_UP = re.compile(r"\x1b\[(\d{0,6})A")


def show(graph_path: Path, skill: str, *, follow: bool) -> int:
    """Print the log as a terminal would show it in the end, and then what is added to it."""
    layout = GraphPaths(graph_path)
    row = find_row(read_rows(layout), skill, graph_path)
    with _opened(newest_log(layout, row)) as file:
        sys.stdout.write(as_shown(file.read()))
        while follow and _still_running(layout, row):
            _pass_on(file)
            time.sleep(_POLL_SECONDS)
        if follow:
            _pass_on(file)
    return 0


def newest_log(layout: GraphPaths, row: SkillRow) -> Path:
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
    return _CONTROL.sub("", "\n".join(lines))


def only_drawn(text: str) -> str:
    r"""A log for a terminal: what draws stays, what else a terminal could be told to do does not.

    >>> only_drawn("\x1b[2K\x1b[32mgreen\x1b]52;c;aGk=\x07")
    '\x1b[2K\x1b[32mgreen]52;c;aGk='
    """
    return _NOT_DRAWN.sub("", text)


def _opened(path: Path) -> TextIO:
    """The log, from where its last `LIMIT_BYTES` begin: a trainer may write there, too."""
    log = open_plain(path)
    log.seek(max(0, os.fstat(log.fileno()).st_size - LIMIT_BYTES))
    return io.TextIOWrapper(log, encoding="utf-8", errors="replace", newline="\n")


def _candidates(layout: GraphPaths, row: SkillRow) -> Iterator[Path]:
    if row.expert is None:
        return
    yield layout.run(row.expert, row.skill).training_log
    yield layout.skill_folder(row.expert, row.skill) / "training.log"
    stem = layout.failed_run(row.expert, row.skill, 0).name.removesuffix("0")
    failed = layout.failed_runs.glob(f"{stem}*/training.log")
    yield from sorted(failed, key=lambda path: path.stat().st_mtime, reverse=True)


def _still_running(layout: GraphPaths, row: SkillRow) -> bool:
    rows = {other.skill: other for other in read_rows(layout)}
    return rows[row.skill].status == "running"


def _pass_on(file: TextIO) -> None:
    """What was added since: as it is drawn for a terminal, which is asked for nothing else."""
    added = file.read(LIMIT_BYTES)
    if added:
        sys.stdout.write(only_drawn(added) if sys.stdout.isatty() else as_shown(added))
        sys.stdout.flush()
