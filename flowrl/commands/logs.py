"""`flowrl logs`: the newest training log of a skill."""

from __future__ import annotations

import io
import os
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TextIO

import tyro

from flowrl.commands.skill_rows import SkillRow, find_row, read_rows
from flowrl.errors import FileRefusedError
from flowrl.paths import DEFAULT_GRAPH, GraphPaths
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


@dataclass(frozen=True, kw_only=True)
class LogsCommand:
    """Print the newest training log of a skill.

    Examples:
      flowrl logs "Collect Wood"
      flowrl logs collect_wood --graph-path exp/demo -f
    """

    skill: tyro.conf.Positional[str]
    """The skill's name, or its expert number."""
    graph_path: Path = DEFAULT_GRAPH
    """Folder of the graph."""
    follow: Annotated[bool, tyro.conf.arg(aliases=["-f"])] = False
    """Go on printing as the log grows, until the run has ended or Ctrl-C."""

    def __call__(self) -> int:
        """Print the log as a terminal would show it in the end, then what is added to it."""
        paths = GraphPaths(self.graph_path)
        row = find_row(read_rows(paths), self.skill, self.graph_path)
        with _open_log(newest_log(paths, row)) as file:
            sys.stdout.write(as_shown(file.read()))
            while self.follow and _still_running(paths, row):
                _print_added(file)
                time.sleep(_POLL_SECONDS)
            if self.follow:
                _print_added(file)
        return 0


def newest_log(paths: GraphPaths, row: SkillRow) -> Path:
    """Return the live run's log, else the archived one, else the last failed attempt's.

    Raises:
      FileRefusedError: the skill has no log yet.
    """
    for path in _candidates(paths, row):
        if path.is_file() and not path.is_symlink():
            return path
    raise FileRefusedError(f"{row.skill} has no training log: it is {row.status}")


def as_shown(text: str) -> str:
    r"""Return what a terminal shows in the end: without colours and overwritten text.

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
    r"""Return a log for a terminal: sequences that draw stay, all others are removed.

    >>> only_drawn("\x1b[2K\x1b[32mgreen\x1b]52;c;aGk=\x07")
    '\x1b[2K\x1b[32mgreen]52;c;aGk='
    """
    return _NOT_DRAWN.sub("", text)


def _open_log(path: Path) -> TextIO:
    """Open the log at its last `LIMIT_BYTES`; it is read without trust, a trainer wrote it."""
    log = open_plain(path)
    log.seek(max(0, os.fstat(log.fileno()).st_size - LIMIT_BYTES))
    return io.TextIOWrapper(log, encoding="utf-8", errors="replace", newline="\n")


def _candidates(paths: GraphPaths, row: SkillRow) -> Iterator[Path]:
    if row.expert is None:
        return
    yield paths.run(row.expert, row.skill).training_log
    yield paths.skill_folder(row.expert, row.skill) / "training.log"
    stem = paths.failed_run(row.expert, row.skill, 0).name.removesuffix("0")
    failed = paths.failed_runs.glob(f"{stem}*/training.log")
    yield from sorted(failed, key=lambda path: path.stat().st_mtime, reverse=True)


def _still_running(paths: GraphPaths, row: SkillRow) -> bool:
    rows = {other.skill: other for other in read_rows(paths)}
    return rows[row.skill].status == "running"


def _print_added(file: TextIO) -> None:
    """Print what was added since the last call; a terminal gets drawing sequences only."""
    added = file.read(LIMIT_BYTES)
    if added:
        sys.stdout.write(only_drawn(added) if sys.stdout.isatty() else as_shown(added))
        sys.stdout.flush()
