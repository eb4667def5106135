"""`flowrl ps` and `flowrl attach`: the schedulers and the sessions that live on this machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from flowrl.arguments import GraphCommand, SkillArgument
from flowrl.commands.status import find_row, read_rows, tally
from flowrl.errors import ConfigError, FileRefusedError, GraphError
from flowrl.parallel.health import daemon_of, in_words
from flowrl.parallel.recovery import recorded_config
from flowrl.paths import GraphPaths, printable


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
        found = sorted(_schedulers(), key=lambda each: each["graph"])
        if self.json:
            sys.stdout.write(json.dumps(found, indent=2) + "\n")
            return 0
        for each in found:
            graph, by = printable(each["graph"]), in_words(each["scheduler"])
            sys.stdout.write(f"{graph}: {by}; {each['skills']}\n")
        if not found:
            sys.stdout.write("no scheduler of yours is at work here; flowrl train begins one\n")
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
        """Become `tmux attach`, or inside the same tmux server `tmux switch-client`.

        Raises:
          ConfigError: tmux is missing, or the terminal is inside another server.
          GraphError: the skill has no session.
        """
        paths = GraphPaths(self.graph_path)
        row = find_row(read_rows(paths), self.skill, paths.root)
        program = shutil.which("tmux")
        if program is None:
            raise ConfigError(f"tmux is missing; flowrl logs {paths.root} SKILL -f shows the run")
        socket = None
        if paths.config_json.exists():
            socket = recorded_config(paths).launch.tmux_socket
        address = ["-S" if "/" in socket else "-L", socket] if socket else []
        tmux = [program, *address]
        env = {name: value for name, value in os.environ.items() if name != "TMUX"}
        listed = subprocess.run(
            [*tmux, "list-panes", "-t", f"={row.session}:", "-F", "#{pid}"],
            check=False,
            env=env,
            capture_output=True,
            text=True,
        )
        server = row.session and listed.stdout.partition("\n")[0]
        if not server:
            raise GraphError(
                f"{row.skill} is {row.status} and has no tmux session; "
                f'flowrl logs {paths.root} "{row.skill}" shows its log'
            )
        here = os.environ.get("TMUX", "").rpartition(",")[0].rpartition(",")[2]
        if here not in ("", server):
            raise ConfigError(
                "this terminal is inside another tmux server than the run's; leave it (Ctrl-B D) "
                f'and attach from there, or see flowrl logs {paths.root} "{row.skill}" -f'
            )
        verb = "switch-client" if here else "attach-session"
        os.execv(program, [*tmux, verb, "-t", f"={row.session}"])  # noqa: S606 — no shell is wanted


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
            paths = GraphPaths(root)
            with suppress(FileRefusedError):
                if (daemon := daemon_of(paths.daemon_lock)) is not None:
                    begun = paths.scheduler_state.is_file()
                    skills = tally(read_rows(paths)) if begun else "it is starting"
                    yield {"graph": str(root), "scheduler": daemon, "skills": skills}
