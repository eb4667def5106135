"""`flowrl ps`, `attach` and `logs`: schedulers and sessions on this machine, and what runs say."""

from __future__ import annotations

import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TextIO
from urllib.parse import unquote

import psutil
import tyro

from flowrl.arguments import GraphCommand, SkillArgument
from flowrl.console import print_report
from flowrl.errors import ConfigError, FileRefusedError, GraphError
from flowrl.launchers.claims import claim_of
from flowrl.launchers.tmux import FOLDER_OPTION
from flowrl.parallel.health import daemon_of, in_words
from flowrl.parallel.recovery import recorded_config
from flowrl.parallel.status import Completed, Running
from flowrl.paths import GraphPaths, graph_or_sweep
from flowrl.reports.status import PHASE_ENDED, SkillRow, find_row, read_rows, tally
from flowrl.storage import open_plain

LIMIT_BYTES = 64 * 2**20
_POLL_SECONDS = 0.2
_NOT_TEXT = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True, kw_only=True)
class PsCommand:
    """List your graphs that have a scheduler on this machine.

    Examples:
      flowrl ps
      flowrl ps --json | jq -r '.[].graph'
    """

    json: bool = False
    """Print JSON instead of lines."""

    def __call__(self) -> int:
        """Print one line for each graph."""
        rows = sorted(_schedulers(), key=lambda each: each["graph"])
        lines = [f"{e['graph']}: {in_words(e['scheduler'])}; {e['skills']}" for e in rows]
        none = "no scheduler of yours is at work here; flowrl train begins one"
        print_report(rows, lines or [none], as_json=self.json)
        return 0


@dataclass(frozen=True, kw_only=True)
class AttachCommand(GraphCommand):
    """Attach to a run's tmux session; Ctrl-B D leaves it.

    Examples:
      flowrl attach exp/demo "Collect Wood"
    """

    skill: SkillArgument
    """The skill's name, or its expert number."""

    def __call__(self) -> int:
        """Become `tmux attach`, or inside the same tmux server `tmux switch-client`."""
        graph_paths = GraphPaths(self.graph_path)
        row = find_row(read_rows(graph_paths), self.skill, graph_paths.root)
        _refuse_engine(graph_paths, row)
        program = shutil.which("tmux")
        if program is None:
            raise ConfigError(
                f"tmux is missing; flowrl logs {graph_paths.root} SKILL -f shows the run"
            )
        begun = graph_paths.config_json.exists()
        socket = recorded_config(graph_paths).launch.tmux_socket if begun else None
        address = ["-S" if "/" in socket else "-L", socket] if socket else []
        tmux = [program, *address]
        env = {name: value for name, value in os.environ.items() if name != "TMUX"}
        listed = subprocess.run(
            [*tmux, "list-panes", "-t", f"={row.session}:", "-F", f"#{{pid}} #{{{FOLDER_OPTION}}}"],
            check=False,
            env=env,
            capture_output=True,
            text=True,
        )
        server, _, folder = listed.stdout.partition("\n")[0].partition(" ")
        own = os.path.realpath(graph_paths.run(row.expert or 0, row.skill).folder)
        if not (row.session and server and os.path.realpath(unquote(folder)) == own):
            log = f'; flowrl logs {graph_paths.root} "{row.skill}" shows its log'
            hint = "" if row.expert is None else log
            raise GraphError(f"{row.skill} is {row.status} and has no tmux session{hint}")
        if not sys.stdin.isatty():
            log = f'flowrl logs {graph_paths.root} "{row.skill}" -f'
            raise ConfigError(f"a session is attached to a terminal, and this is none; see {log}")
        here = os.environ.get("TMUX", "").rpartition(",")[0].rpartition(",")[2]
        if here not in ("", server):
            raise ConfigError(
                "this terminal is inside another tmux server than the run's; leave it (Ctrl-B D) "
                f'and attach from there, or see flowrl logs {graph_paths.root} "{row.skill}" -f'
            )
        verb = "switch-client" if here else "attach-session"
        os.execv(program, [*tmux, verb, "-t", f"={row.session}"])  # noqa: S606 — no shell is wanted


def _refuse_engine(graph_paths: GraphPaths, row: SkillRow) -> None:
    """Raise GraphError with what shows a run that an engine has on another host."""
    run_paths = graph_paths.run(row.expert or 0, row.skill)
    claim = claim_of(run_paths.folder) if row.expert is not None else None
    if claim is None or not claim.engine:
        return
    log = f'flowrl logs {graph_paths.root} "{row.skill}" -f'
    if claim.engine == "slurm":
        tail = shlex.join(["tail", "-f", str(run_paths.training_log.absolute())])
        log += f", or on its node: srun --jobid={claim.engine_id} --overlap --pty {tail}"
    raise GraphError(
        f"{row.skill} is job {claim.engine_id} of {claim.engine}, not a tmux session; see {log}"
    )


def _schedulers() -> Iterator[dict[str, Any]]:
    """The graphs whose lock a process of this user holds open."""
    for process in psutil.process_iter():
        roots: list[Path] = []
        with suppress(psutil.Error):
            if process.uids().effective == os.geteuid():
                roots = [
                    Path(file.path).parent
                    for file in process.open_files()
                    if Path(file.path).name == GraphPaths(Path()).daemon_lock.name
                ]
        for root in roots:
            graph_paths = GraphPaths(root)
            with suppress(FileRefusedError):
                if (daemon := daemon_of(graph_paths.daemon_lock)) is not None:
                    begun = graph_paths.scheduler_state.is_file()
                    skills = tally(read_rows(graph_paths)) if begun else "it is starting"
                    yield {"graph": str(root), "scheduler": daemon, "skills": skills}


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
        graph_paths = graph_or_sweep(self.graph_path)
        row = find_row(read_rows(graph_paths), self.skill, self.graph_path)
        path = _newest_log(graph_paths, row)
        with ExitStack() as opened:
            file = opened.enter_context(_open_log(path))
            _print_added(file)
            while self.follow and row.status == Running.kind and row.phase != PHASE_ENDED:
                time.sleep(_POLL_SECONDS)
                anew = _is_begun_anew(path, file)
                _print_added(file)
                if anew:
                    opened.close()
                    file = opened.enter_context(_open_log(path))
                row = find_row(read_rows(graph_paths), row.skill, graph_paths.root)
            _print_added(file)  # what came before the run's end was seen
        return 0


def _newest_log(graph_paths: GraphPaths, row: SkillRow) -> Path:
    """The live run's log, else the archived one, else the last failed attempt's."""
    if row.expert is not None:
        live, run_paths = (
            graph_paths.run(row.expert, row.skill),
            graph_paths.archive(row.expert, row.skill),
        )
        stem = graph_paths.failed_run(row.expert, row.skill, 0).name.removesuffix("0")
        failed = graph_paths.failed_runs.glob(f"{stem}*/training.log")
        newest_first = sorted(failed, key=lambda path: path.stat().st_mtime, reverse=True)
        for path in (live.training_log, run_paths.training_log, *newest_first):
            if path.is_file() and not path.is_symlink():
                return path
    problem = f"{row.skill} has no training log: it is {row.status}"
    if row.status == Completed.kind:
        raise FileRefusedError(f"{problem}, and the file was removed; train it anew for another")
    raise FileRefusedError(f"{problem}; {graph_paths.command('status')} says what it waits for")


def _open_log(path: Path) -> TextIO:
    """Open the log at its last `LIMIT_BYTES`; it is read without trust, a trainer wrote it."""
    log = open_plain(path)
    log.seek(max(0, os.fstat(log.fileno()).st_size - LIMIT_BYTES))
    return io.TextIOWrapper(log, encoding="utf-8", errors="replace")


def _is_begun_anew(path: Path, log: TextIO) -> bool:
    """Return whether a long log was put aside: another file has its name."""
    try:
        return not os.path.samestat(path.lstat(), os.fstat(log.fileno()))
    except FileNotFoundError:  # between the two renames, or archived
        return False


def _print_added(file: TextIO) -> None:
    *lines, rest = _NOT_TEXT.sub("", file.read(LIMIT_BYTES)).split("\n")
    sys.stdout.write("\n".join([*(line.rstrip(" ") for line in lines), rest]))
    sys.stdout.flush()
