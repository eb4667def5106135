"""Runs as tmux sessions, so that people can attach to a training and read a failed one.

tmux is only the stage: whether a run lives and how it ended is read from its folder. Sessions are
on the user's own server and are treated as his: options are set per session, a session with
somebody in it is never killed, and one that does not carry our run id is never touched.
"""

from __future__ import annotations

import contextlib
import logging
import re
import shlex
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import libtmux
from libtmux.common import tmux_cmd
from libtmux.exc import TmuxCommandNotFound

from flowrl.errors import LaunchError
from flowrl.launch import files, processes
from flowrl.launch.job import Finished, Handle, Job, Outcome
from flowrl.launch.waiting import EndWatcher
from flowrl.layout import RunLayout

GRACE_SECONDS = 30.0
KEEP_SECONDS = 30.0
RUN_OPTION = "@flowrl_run"

_PANE_FIELDS = ("session_name", "pane_id", "pane_pid", "pid", RUN_OPTION)
_PANE_FORMAT = "\t".join(f"#{{{field}}}" for field in _PANE_FIELDS)
_SAFE = re.compile(r"[A-Za-z0-9_.-]+")
_COLUMNS, _LINES = "160", "48"
_SERVER_PAUSE_SECONDS = 0.05
_OLD_RUN_SECONDS = 1.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Pane:
    session: str
    pane: str
    pid: int
    server_pid: int
    run_id: str

    @classmethod
    def parse(cls, line: str) -> _Pane:
        session, pane, pid, server_pid, run_id = line.split("\t")
        return cls(session, pane, int(pid), int(server_pid), run_id)


class TmuxLauncher:
    """The Launcher on a tmux server; `socket` is a name (as `tmux -L`), a path, or the default."""

    def __init__(
        self,
        socket: str | None = None,
        *,
        grace_seconds: float = GRACE_SECONDS,
        keep_seconds: float = KEEP_SECONDS,
    ) -> None:
        by_path = socket is not None and "/" in socket
        self._server = libtmux.Server(
            socket_name=None if by_path else socket, socket_path=socket if by_path else None
        )
        self._grace_seconds = grace_seconds
        self._keep_seconds = keep_seconds
        self._watcher = EndWatcher()
        self._succeeded: dict[str, tuple[Handle, float]] = {}  # run id → when to reap its session

    def launch(self, job: Job) -> Handle:
        """Start a run in a session of its own, or in the session its former attempt left.

        Raises:
          LaunchError: tmux is missing or failed, or the session's name belongs to someone else.
        """
        known = files.found(job)
        if known is not None and files.outcome(known, job.folder) is None:
            return known
        _check_words(job)
        files.prepare(job, grace_seconds=self._grace_seconds)
        reply = self._tmux(*_new_session(job))
        if reply.returncode == 0:
            return _handle(job, _Pane.parse(reply.stdout[0]))
        if any("duplicate session" in line for line in reply.stderr):
            return self._reuse_session(job)
        if reply.stdout:  # it has started, without one of its options
            self._tmux("kill-pane", "-t", _Pane.parse(reply.stdout[0]).pane)
        raise LaunchError(f"tmux cannot start {job.name}: {_why(reply)}")

    def find(self, job: Job) -> Handle | None:
        """A run that was launched before, whether it lives or has ended."""
        return files.found(job)

    def poll(self, handle: Handle, folder: Path) -> Outcome | None:
        """How the run ended, or None while it lives."""
        outcome = files.outcome(handle, folder)
        if isinstance(outcome, Finished) and handle.run_id not in self._succeeded:
            self._succeeded[handle.run_id] = (handle, time.monotonic() + self._keep_seconds)
        return outcome

    def cancel(self, handle: Handle, folder: Path) -> None:
        """Ask the run to end; returns at once."""
        files.stop(handle, folder)

    def wait(self, handles: Collection[Handle], *, timeout_seconds: float) -> None:
        """Return as soon as one of the runs may have ended, or after the timeout."""
        for handle, due in list(self._succeeded.values()):
            if due <= time.monotonic():
                self._succeeded[handle.run_id] = (handle, due + self._keep_seconds)
                with contextlib.suppress(LaunchError):
                    self.reap(handle)
        self._watcher.wait(handles, timeout_seconds=timeout_seconds)

    def reap(self, handle: Handle) -> bool:
        """End the session of an ended run unless somebody is attached; whether it is gone."""
        ours = f"#{{==:#{{{RUN_OPTION}}},{handle.run_id}}}"
        empty = "#{&&:#{pane_dead},#{==:#{session_attached},0}}"
        reply = self._tmux(
            *("if-shell", "-F", "-t", f"{handle.pane}", f"#{{&&:{ours},{empty}}}"),
            f"display-message -p gone ; kill-pane -t {handle.pane}",
        )
        gone = reply.returncode != 0 or reply.stdout == ["gone"]
        if gone:
            self._succeeded.pop(handle.run_id, None)
        return gone

    def close(self) -> None:
        """Reap what succeeded; runs go on."""
        with contextlib.suppress(LaunchError):
            deadline = time.monotonic() + _OLD_RUN_SECONDS
            while self._reap_all() and time.monotonic() < deadline:
                time.sleep(_SERVER_PAUSE_SECONDS)

    def _reap_all(self) -> bool:
        """Whether a session of a run that succeeded is left."""
        return not all([self.reap(handle) for handle, _ in list(self._succeeded.values())])

    def _reuse_session(self, job: Job) -> Handle:
        """What to do when the session exists: adopt this run, replace an ended one, or refuse."""
        deadline = time.monotonic() + _OLD_RUN_SECONDS
        while True:
            panes = self._panes("-s", "-t", f"={job.name}")
            ours = [pane for pane in panes if pane.run_id]
            if not ours:
                raise LaunchError(
                    f"a tmux session {job.name} exists that is not flowrl's; "
                    f"rename it (tmux rename-session -t ={job.name} other) or end it"
                )
            pane = ours[0]
            lives = bool(processes.birth_of(pane.pid))
            if lives and pane.run_id == job.run_id:
                return _handle(job, pane)
            if not lives:
                return self._respawn(job, pane)
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"run {pane.run_id} still lives in tmux session {job.name}; end it, "
                    "or give this graph a server of its own with --tmux_socket"
                )
            time.sleep(_SERVER_PAUSE_SECONDS)  # its exit is recorded, its process is just ending

    def _respawn(self, job: Job, pane: _Pane) -> Handle:
        """Start a run in the dead pane of a former one: whoever is attached stays attached."""
        reply = self._tmux(
            *("respawn-pane", "-k", "-t", pane.pane, "--", *_runner(job)),
            *_settings(job, pane.pane),
            *(";", "display-message", "-p", "-t", pane.pane, _PANE_FORMAT),
        )
        if reply.returncode != 0:
            raise LaunchError(f"tmux cannot restart {job.name}: {_why(reply)}")
        return _handle(job, _Pane.parse(reply.stdout[0]))

    def _panes(self, *scope: str) -> list[_Pane]:
        reply = self._tmux("list-panes", *scope, "-F", _PANE_FORMAT)
        return [_Pane.parse(line) for line in reply.stdout] if reply.returncode == 0 else []

    def _tmux(self, *words: str) -> tmux_cmd:
        try:
            reply = self._server.cmd(words[0], *words[1:])
            if any("server exited unexpectedly" in line for line in reply.stderr):
                time.sleep(_SERVER_PAUSE_SECONDS)  # it was just ending as we came
                reply = self._server.cmd(words[0], *words[1:])
        except TmuxCommandNotFound as error:
            raise LaunchError(
                "tmux is not installed: apt install tmux, or use --launcher local"
            ) from error
        except OSError as error:
            raise LaunchError(f"tmux cannot be executed: {error}") from error
        if reply.returncode != 0:
            logger.debug("tmux refused", extra={"tmux": words, "stderr": reply.stderr})
        return reply


def _new_session(job: Job) -> list[str]:
    """One tmux command: in a second one, the options would come too late for a fast exit."""
    return [
        *("new-session", "-d", "-P", "-F", _PANE_FORMAT, "-s", job.name, "-n", job.name),
        *("-x", _COLUMNS, "-y", _LINES, "--", *_runner(job)),
        *_settings(job, f"={job.name}:"),
    ]


def _settings(job: Job, target: str) -> list[str]:
    """The options of our pane, chained: kept when dead or detached, labelled, logged."""
    log = shlex.join(
        [
            *(sys.executable, "-I", "-S", str(files.CAPPED_LOG)),
            str(RunLayout(job.folder, expert=0).training_log.absolute()),
        ]
    )
    return [
        *(";", "set-option", "-p", "-t", target, RUN_OPTION, job.run_id),
        *(";", "set-option", "-p", "-t", target, "remain-on-exit", "on"),
        *(";", "set-option", "-t", target, "destroy-unattached", "off"),
        # It runs in the server's folder, and tmux expands times and formats before the shell.
        *(";", "pipe-pane", "-t", target, f"exec {log}".replace("%", "%%").replace("#", "##")),
    ]


def _runner(job: Job) -> tuple[str, ...]:
    """Several words, so no shell; neither environment nor argv of the trainer is among them."""
    spec = RunLayout(job.folder, expert=0).spec_json.absolute()
    return (sys.executable, "-I", "-S", str(files.RUNNER), str(spec))


def _handle(job: Job, pane: _Pane) -> Handle:
    return Handle(
        run_id=job.run_id,
        session=pane.session,
        pid=pane.pid,
        birth=processes.birth_of(pane.pid),
        pane=pane.pane,
        server_pid=pane.server_pid,
    )


def _check_words(job: Job) -> None:
    """Names go into tmux targets and formats, where other characters have a meaning."""
    for word in (job.name, job.run_id):
        if not _SAFE.fullmatch(word):
            raise LaunchError(f"{word!r} cannot name a tmux session; use letters, digits, _ . -")


def _why(reply: tmux_cmd) -> str:
    return "; ".join(reply.stderr) or f"exit code {reply.returncode}"
