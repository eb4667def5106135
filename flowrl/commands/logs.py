"""`flowrl logs`, a command of its own: the newest training log of a skill."""

from __future__ import annotations

import io
import os
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TextIO

import tyro

from flowrl.arguments import GraphCommand, SkillArgument
from flowrl.commands.status import SkillRow, find_row, read_rows
from flowrl.errors import FileRefusedError
from flowrl.paths import GraphPaths, graph_paths
from flowrl.storage import open_plain

LIMIT_BYTES = 64 * 2**20
_POLL_SECONDS = 0.2
_NOT_TEXT = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True, kw_only=True)
class LogsCommand(GraphCommand):
    """Print the newest training log of a skill.

    Examples:
      flowrl logs "Collect Wood"
      flowrl logs exp/demo collect_wood -f
    """

    skill: SkillArgument
    """The skill's name, or its expert number."""
    follow: Annotated[bool, tyro.conf.arg(aliases=["-f"])] = False
    """Go on printing as the log grows, until the run has ended or Ctrl-C."""

    def __call__(self) -> int:
        """Print the log without colours and control characters, then what is added to it."""
        paths = graph_paths(self.graph_path)
        row = find_row(read_rows(paths), self.skill, self.graph_path)
        with _open_log(_newest_log(paths, row)) as file:
            _print_added(file)
            while self.follow and _still_running(paths, row):
                time.sleep(_POLL_SECONDS)
                _print_added(file)
            _print_added(file)  # what came before the run's end was seen
        return 0


def _newest_log(paths: GraphPaths, row: SkillRow) -> Path:
    """The live run's log, else the archived one, else the last failed attempt's.

    Raises:
      FileRefusedError: the skill has no log yet.
    """
    if row.expert is not None:
        live, archive = paths.run(row.expert, row.skill), paths.archive(row.expert, row.skill)
        stem = paths.failed_run(row.expert, row.skill, 0).name.removesuffix("0")
        failed = paths.failed_runs.glob(f"{stem}*/training.log")
        newest_first = sorted(failed, key=lambda path: path.stat().st_mtime, reverse=True)
        for path in (live.training_log, archive.training_log, *newest_first):
            if path.is_file() and not path.is_symlink():
                return path
    raise FileRefusedError(f"{row.skill} has no training log: it is {row.status}")


def _open_log(path: Path) -> TextIO:
    """Open the log at its last `LIMIT_BYTES`; it is read without trust, a trainer wrote it."""
    log = open_plain(path)
    log.seek(max(0, os.fstat(log.fileno()).st_size - LIMIT_BYTES))
    return io.TextIOWrapper(log, encoding="utf-8", errors="replace")


def _still_running(paths: GraphPaths, row: SkillRow) -> bool:
    rows = {other.skill: other for other in read_rows(paths)}
    return rows[row.skill].status == "running"


def _print_added(file: TextIO) -> None:
    sys.stdout.write(_NOT_TEXT.sub("", file.read(LIMIT_BYTES)))
    sys.stdout.flush()
