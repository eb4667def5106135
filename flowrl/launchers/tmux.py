"""Jobs as tmux sessions, so that people can attach to a training and read a failed one.

tmux is never asked whether a job lives or how it ended; the job's folder says that. Sessions are
on the user's own server: options are set per session, and one without our run id is never touched.
tmux closes the session of a job that succeeds or was asked to end; that of a failed job stays to
be read, and the next attempt runs in it. Jobs are told apart by their folders, also those of graphs
that share a server. A name that another program uses gets a number.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path
from subprocess import CompletedProcess, TimeoutExpired
from urllib.parse import quote, unquote

from flowrl.errors import ConfigError, LaunchError
from flowrl.launchers import child, process, run_status
from flowrl.launchers.base import Handle, Job, Outcome
from flowrl.launchers.launcher import GRACE_SECONDS, Launcher
from flowrl.launchers.run_status import LOG_WRITER
from flowrl.launchers.sandbox import may_pass
from flowrl.redaction import secrets_of

RUN_OPTION = "@flowrl_run"
FOLDER_OPTION = "@flowrl_folder"
REPLY_SECONDS = 10.0

_FIELDS = ("session_name", "pane_id", "pane_pid", "pid", "pane_dead", RUN_OPTION, FOLDER_OPTION)
_PANE_FORMAT = "\t".join(f"#{{{field}}}" for field in _FIELDS)
_MISSING = "tmux is not installed; install it (apt install tmux) or use --launcher local"
_ENDING = "server exited unexpectedly"
_NO_SERVER = ("no server running", "No such file or directory", "no current target")
_CLOSED = ("can't find pane", *_NO_SERVER)
_COLUMNS, _LINES = "160", "48"
_SOCKET_BYTES = 107  # of a path in sockaddr_un
_PAUSE_SECONDS = 0.05
_FORMER_RUN_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Pane:
    """A pane as `_PANE_FORMAT` prints it; those that are not flowrl's have no run and no folder."""

    session: str
    pane: str
    pid: int
    server_pid: int
    dead: bool  # as the server knows; it may be late to notice
    run_id: str
    folder: str

    @classmethod
    def parse(cls, line: str) -> Pane:
        """Read one line."""
        session, pane, pid, server_pid, dead, run_id, folder = line.split("\t")
        return cls(session, pane, int(pid), int(server_pid), dead == "1", run_id, folder)


class TmuxServer:
    """A tmux server that may be missing, just ending, or frozen.

    `socket` is a name (as `tmux -L`), a path, or None for the user's own server.
    """

    def __init__(self, socket: str | None = None) -> None:
        self.socket_path = socket if socket and "/" in socket else None
        # The words after `tmux` that name the server.
        self.address = () if socket is None else ("-S" if self.socket_path else "-L", socket)

    def run(self, *words: str) -> CompletedProcess[str]:
        """Run one tmux command line; the reply says what tmux refused.

        Raises LaunchError if tmux is missing, cannot be executed or does not answer.
        """
        reply = self._run(words)
        if _ENDING in reply.stderr:
            time.sleep(_PAUSE_SECONDS)
            return self._run(words)
        return reply

    def panes(self) -> list[Pane]:
        """Every pane of the server; raises LaunchError if tmux cannot list them."""
        reply = self.run("list-panes", "-a", "-F", _PANE_FORMAT)
        if reply.returncode == 0:
            return [Pane.parse(line) for line in reply.stdout.splitlines()]
        if any(words in reply.stderr for words in _NO_SERVER):
            return []
        raise LaunchError(f"tmux cannot list its panes: {child.reason(reply)}")

    def _run(self, words: tuple[str, ...]) -> CompletedProcess[str]:
        """Run a client; libtmux's `Server.cmd` would wait for a frozen server for ever."""
        try:
            tmux = (shutil.which("tmux") or "tmux", *self.address, *words)
            return child.run(tmux, env=_environment(), seconds=REPLY_SECONDS)
        except TimeoutExpired as error:
            raise LaunchError(
                f"the tmux server does not answer within {REPLY_SECONDS:g} s; "
                "if it is stopped, continue it (kill -CONT) or end it"
            ) from error
        except FileNotFoundError as error:
            raise LaunchError(_MISSING) from error
        except OSError as error:
            raise LaunchError(f"tmux cannot be executed: {error}") from error


class TmuxLauncher(Launcher):
    """The Launcher on a tmux server; `socket` as for `TmuxServer`."""

    def __init__(self, socket: str | None = None, *, grace_seconds: float = GRACE_SECONDS) -> None:
        super().__init__(grace_seconds=grace_seconds)
        self.server = TmuxServer(socket)
        self._servers: set[int] = set()  # the pids of those in which a job has ended

    def check(self) -> None:
        """Raise ConfigError if tmux is missing or too old, or has no folder for its socket."""
        from libtmux.common import has_minimum_version  # a tenth of what a start loads
        from libtmux.exc import LibTmuxException

        socket = self.server.socket_path
        if socket is not None and not Path(socket).parent.is_dir():
            raise ConfigError(f"--tmux_socket {socket}: its folder does not exist; make it first")
        if socket is not None and Path(socket).exists() and not Path(socket).is_socket():
            raise ConfigError(f"--tmux_socket {socket} is there and is no socket; name another")
        folder = Path(os.environ.get("TMUX_TMPDIR") or "/tmp", f"tmux-{os.getuid()}")  # noqa: S108
        for name in self.server.address[1:]:  # a path stands for itself
            if len(os.fsencode(folder / name)) > _SOCKET_BYTES:
                most = f"longer than the {_SOCKET_BYTES} bytes of a socket"
                raise ConfigError(f"--tmux_socket {name} is {most}; choose a shorter one")
        if shutil.which("tmux") is None:
            raise ConfigError(_MISSING)
        try:
            has_minimum_version()
        except LibTmuxException as error:
            raise ConfigError(f"tmux cannot be used, use --launcher local: {error}") from error

    def find(self, job: Job) -> Handle | None:
        """A job that was launched before, under its session's name of today."""
        handle = super().find(job)
        if handle is None:
            return None
        with contextlib.suppress(LaunchError):
            for pane in self.server.panes():
                here = (pane.pane, pane.server_pid, pane.run_id)
                if here == (handle.pane, handle.server_pid, handle.run_id):
                    return replace(handle, session=pane.session)
        return handle

    def poll(self, handle: Handle, folder: Path) -> Outcome | None:
        """Return the outcome of the job, or None while it lives."""
        outcome = super().poll(handle, folder)
        if outcome is not None and handle.server_pid is not None:
            self._servers.add(handle.server_pid)
        return outcome

    def wait(self, handles: Collection[Handle], *, timeout_seconds: float) -> bool:
        """Wait until a job may have ended (returns True), or for the timeout (returns False)."""
        self._remind_servers()
        return super().wait(handles, timeout_seconds=timeout_seconds)

    def clear(self, runs: Path, done: Collection[Path]) -> None:
        """Close the sessions of ended jobs below `runs` that are done.

        The others below it stay to be read, without the writers of their logs, which tmux lets
        wait for more.
        """
        for pane in self.server.panes():
            folder = Path(unquote(pane.folder))
            if process.start_time_of(pane.pid) or folder.parent != runs:
                continue
            if not pane.dead:
                self._servers.add(pane.server_pid)  # reminded while waiting, cleared next time
            elif folder in done:
                self.server.run("kill-pane", "-t", pane.pane)
            else:
                for pid in process.of_script(LOG_WRITER, str(folder / "training.log")):
                    process.send(pid, process.start_time_of(pid), signal.SIGKILL)

    def close(self) -> None:
        """Release what the launcher holds in this process; jobs go on."""
        self._remind_servers()

    def _remind_servers(self) -> None:
        """Tell servers again that a pane's process has ended: tmux 3.3 overlooks some ends."""
        for pid in list(self._servers):
            try:
                os.kill(pid, signal.SIGCHLD)
            except OSError:
                self._servers.discard(pid)  # it has ended

    def _start(self, job: Job) -> Handle:
        """Adopt this run, replace an ended one of this graph, or begin a session."""
        deadline = time.monotonic() + _FORMER_RUN_SECONDS
        while True:
            panes = self.server.panes()
            own = [pane for pane in panes if pane.folder == _quoted(job.folder)]
            living = [pane for pane in own if process.start_time_of(pane.pid)]
            if own and not living and (handle := self._respawn(job, own[0])) is not None:
                return handle
            if living and living[0].run_id == job.run_id:
                return _handle(job, living[0])
            if not own and (handle := self._begin(job, _free_name(job, panes))) is not None:
                return handle
            if time.monotonic() > deadline:
                raise LaunchError(self._still_lives(job, living))
            time.sleep(_PAUSE_SECONDS)  # its exit is recorded, its process is just ending

    def _still_lives(self, job: Job, living: Collection[Pane]) -> str:
        """Return the reason why a job cannot start now, and how a user removes the obstacle."""
        tmux = shlex.join(["tmux", *self.server.address])
        ends = " or ".join(f"{tmux} kill-session -t {pane.session}" for pane in living)
        return f"a former run of {job.name} still lives" + (f"; to end it: {ends}" if ends else "")

    def _begin(self, job: Job, name: str) -> Handle | None:
        """Start a job in a new session; None when its name has been taken meanwhile."""
        reply = self.server.run(
            *("new-session", "-d", "-P", "-F", _PANE_FORMAT, "-s", name, "-n", name),
            *("-x", _COLUMNS, "-y", _LINES, "--", *run_status.runner_words(job)),
            *_options(job, f"={name}:"),
        )
        if reply.returncode == 0:
            return _handle(job, Pane.parse(reply.stdout.splitlines()[0]))
        if "duplicate session" in reply.stderr:
            return None
        if reply.stdout:  # it has started, without one of its options
            self.server.run("kill-pane", "-t", Pane.parse(reply.stdout.splitlines()[0]).pane)
        raise LaunchError(f"tmux cannot start {name}: {child.reason(reply)}")

    def _respawn(self, job: Job, pane: Pane) -> Handle | None:
        """Start a job in the dead pane of a former one: attached clients stay attached.

        None when tmux has closed it meanwhile.
        """
        reply = self.server.run(
            *("respawn-pane", "-k", "-t", pane.pane, "--", *run_status.runner_words(job)),
            *_options(job, pane.pane),
            *(";", "display-message", "-p", "-t", pane.pane, _PANE_FORMAT),
        )
        if any(words in reply.stderr for words in _CLOSED):
            return None
        if reply.returncode != 0:
            raise LaunchError(f"tmux cannot restart {pane.session}: {child.reason(reply)}")
        return _handle(job, Pane.parse(reply.stdout.splitlines()[0]))


def _environment() -> dict[str, str]:
    """Return the environment of a server that we start, and so of its sessions: nothing secret.

    Without TMUX, so that a graph has one server, whichever its scheduler is started in.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if name == "TMUX_TMPDIR" or (may_pass(name) and not secrets_of({name: value}))
    }


def _options(job: Job, target: str) -> list[str]:
    """Commands chained to the one that starts the runner: a later call would miss a fast exit."""
    log = "exec " + shlex.join(run_status.log_words(job))
    log = log.replace("%", "%%").replace("#", "##")  # times and formats, which tmux expands
    return [
        *(";", "set-option", "-p", "-t", target, RUN_OPTION, job.run_id),
        *(";", "set-option", "-p", "-t", target, FOLDER_OPTION, _quoted(job.folder)),
        *(";", "set-option", "-p", "-t", target, "remain-on-exit", "failed"),
        *(";", "set-option", "-t", target, "destroy-unattached", "off"),
        *(";", "pipe-pane", "-t", target, log),
    ]


def _quoted(folder: Path) -> str:
    """A job's folder in characters that mean nothing to tmux."""
    return quote(str(folder.absolute()))


def _free_name(job: Job, panes: Collection[Pane]) -> str:
    """The job's name, with the first free number if it is taken."""
    taken = {pane.session for pane in panes}
    names = chain([job.name], (f"{job.name}_{number}" for number in count(2)))
    return next(name for name in names if name not in taken)


def _handle(job: Job, pane: Pane) -> Handle:
    return Handle(
        run_id=job.run_id,
        session=pane.session,
        pid=pane.pid,
        start_time=process.start_time_of(pane.pid),
        pane=pane.pane,
        server_pid=pane.server_pid,
    )
