"""What is said to tmux to start a run in a pane: one command line, chained by `;`."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path
from urllib.parse import quote

from flowrl.launchers import files, spec
from flowrl.launchers.job import Job
from flowrl.launchers.tmux_server import FOLDER_OPTION, PANE_FORMAT, RUN_OPTION
from flowrl.paths import RunPaths

_COLUMNS, _LINES = "160", "48"


def plain(name: str) -> str:
    """A session's name as tmux makes it."""
    return name.replace(".", "_")


def graph_folder(job: Job) -> str:
    """Where the graph's runs are, in characters that mean nothing to tmux."""
    return quote(str(job.folder.parent.absolute()))


def new_session(job: Job, name: str) -> list[str]:
    """One tmux command: in a second one, the options would come too late for a fast exit."""
    return [
        *("new-session", "-d", "-P", "-F", PANE_FORMAT, "-s", name, "-n", name),
        *("-x", _COLUMNS, "-y", _LINES, "--", *runner_of(job)),
        *settings(job, f"={name}:"),
    ]


def settings(job: Job, target: str) -> list[str]:
    """The options of our pane, chained: kept when dead or detached, labelled, logged."""
    return [
        *(";", "set-option", "-p", "-t", target, RUN_OPTION, job.run_id),
        *(";", "set-option", "-p", "-t", target, FOLDER_OPTION, graph_folder(job)),
        *(";", "set-option", "-p", "-t", target, "remain-on-exit", "on"),
        *(";", "set-option", "-t", target, "destroy-unattached", "off"),
        # It runs in the server's folder, and tmux expands times and formats before the shell.
        *(";", "pipe-pane", "-t", target, log_writer(job).replace("%", "%%").replace("#", "##")),
    ]


def log_writer(job: Job) -> str:
    """What the shell behind the pane's pipe is told: to be `cat`, or else a Python of its own."""
    folder = job.folder.absolute()
    pipe = spec.make_log_pipe(folder) if shutil.which("cat") else None
    if pipe:
        return cat_into(pipe)
    log = RunPaths(folder, expert=0).training_log
    return "exec " + shlex.join([sys.executable, "-I", "-S", str(files.CAPPED_LOG), str(log)])


def cat_into(pipe: Path) -> str:
    """To be a `cat` into a named pipe; where it is gone by then, a plain file would be made."""
    cat, place = shlex.quote(shutil.which("cat") or "cat"), shlex.quote(str(pipe))
    return f"test -p {place} && exec {cat} >{place}"


def runner_of(job: Job) -> tuple[str, ...]:
    """Several words, so no shell; neither environment nor argv of the trainer is among them."""
    spec_json = RunPaths(job.folder, expert=0).spec_json.absolute()
    return (sys.executable, "-I", "-S", str(files.RUNNER), str(spec_json))
