"""Runs as tmux sessions, so that people can attach to a training and read a failed one.

tmux is only the stage: whether a run lives and how it ended is read from its folder. Sessions are
on the user's own server and are treated as his: options are set per session, a session with
somebody in it is never killed, and one that does not carry our run id is never touched. Graphs
that share a server are told apart by the folder of their runs: a session of this graph is used
again, a name that anybody else uses gets a number.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

from flowrl.errors import LaunchError
from flowrl.launchers import files, processes, spec
from flowrl.launchers.job import Finished, Handle, Job, Outcome
from flowrl.launchers.tmux_server import PANE_FORMAT, RUN_OPTION, Pane, Reply, TmuxServer
from flowrl.launchers.tmux_words import (
    graph_folder,
    new_session,
    plain,
    runner_of,
    settings,
)
from flowrl.launchers.waiting import EndWatcher

GRACE_SECONDS = 30.0
KEEP_SECONDS = 30.0

_SAFE = re.compile(r"[A-Za-z0-9_.-]+")
_PAUSE_SECONDS = 0.05
_OLD_RUN_SECONDS = 1.0
_REAP_SECONDS = 0.5  # at least, between two times that sessions are reaped
_AT_ONCE = 20  # with one command: tmux takes some 16 KB


class TmuxLauncher:
    """The Launcher on a tmux server; `socket` is a name (as `tmux -L`), a path, or the default."""

    def __init__(
        self,
        socket: str | None = None,
        *,
        grace_seconds: float = GRACE_SECONDS,
        keep_seconds: float = KEEP_SECONDS,
    ) -> None:
        self._server = TmuxServer(socket)
        self._grace_seconds = grace_seconds
        self._keep_seconds = keep_seconds
        self._watcher = EndWatcher()
        self._succeeded: dict[str, tuple[Handle, float]] = {}  # run id → when to reap its session
        self._next_reaping = 0.0

    def check(self) -> None:
        """See that runs can be launched at all.

        Raises:
          ConfigError: tmux is missing or too old.
        """
        self._server.check()

    def launch(self, job: Job) -> Handle:
        """Start a run in a session of its own, or in the session its former attempt left.

        Raises:
          LaunchError: tmux is missing, failed or frozen, or a former attempt still lives.
        """
        known = files.found(job)
        if known is not None and files.outcome(known, job.folder) is None:
            return self._named(known)
        if not _are_safe(job):
            raise LaunchError(
                f"{job.name!r} with {job.run_id!r} cannot name a tmux session; use letters, "
                "digits, _ . -"
            )
        fresh = spec.is_missing(job.folder)
        files.prepare(job, grace_seconds=self._grace_seconds)
        try:
            return (self._begin(job, plain(job.name)) if fresh else None) or self._start(job)
        except LaunchError:
            files.withdraw(job)
            raise

    def find(self, job: Job) -> Handle | None:
        """A run that was launched before, whether it lives or has ended."""
        known = files.found(job)
        return None if known is None else self._named(known)

    def poll(self, handle: Handle, folder: Path) -> Outcome | None:
        """How the run ended, or None while it lives."""
        if self._watcher.sees_alive(handle):
            return None
        outcome = files.outcome(handle, folder)
        if isinstance(outcome, Finished) and handle.run_id not in self._succeeded:
            self._succeeded[handle.run_id] = (handle, time.monotonic() + self._keep_seconds)
        return outcome

    def cancel(self, handle: Handle, folder: Path) -> None:
        """Ask the run to end; returns at once."""
        files.stop(folder)

    def wait(self, handles: Collection[Handle], *, timeout_seconds: float) -> None:
        """Return as soon as one of the runs may have ended, or after the timeout."""
        with contextlib.suppress(LaunchError):
            self._reap_due()
        self._watcher.wait(handles, timeout_seconds=timeout_seconds)

    def reap(self, handle: Handle) -> bool:
        """End the session of an ended run unless somebody is attached; whether it is gone."""
        return self._reap([handle])

    def close(self) -> None:
        """Reap what succeeded; runs go on."""
        self._watcher.close()
        with contextlib.suppress(LaunchError):
            deadline = time.monotonic() + _OLD_RUN_SECONDS
            left = [handle for handle, _ in self._succeeded.values()]
            while not self._reap(left) and time.monotonic() < deadline:
                time.sleep(_PAUSE_SECONDS)
                left = [handle for handle, _ in self._succeeded.values()]

    def _reap_due(self) -> None:
        """Try once for each session whose time has come; the next try is a while later."""
        now = time.monotonic()
        if now < self._next_reaping:
            return
        self._next_reaping = now + _REAP_SECONDS
        due = [handle for handle, when in self._succeeded.values() if when <= now]
        for handle in due:
            self._succeeded[handle.run_id] = (handle, now + self._keep_seconds)
        self._reap(due)

    def _reap(self, handles: Sequence[Handle]) -> bool:
        """As `reap`, of many with few commands; whether all are gone."""
        gone: list[Handle] = []
        for first in range(0, len(handles), _AT_ONCE):
            some = handles[first : first + _AT_ONCE]
            reply = self._tmux(*[word for handle in some for word in (*_ending(handle), ";")][:-1])
            gone += [one for one in some if reply.returncode != 0 or one.run_id in reply.stdout]
        for handle in gone:
            self._succeeded.pop(handle.run_id, None)
        return len(gone) == len(handles)

    def _start(self, job: Job) -> Handle:
        """Adopt this run, replace an ended one of this graph, or begin a session."""
        deadline = time.monotonic() + _OLD_RUN_SECONDS
        while True:
            panes = self._panes()
            own = [pane for pane in panes if _is_own(pane, job)]
            living = [pane for pane in own if processes.birth_of(pane.pid)]
            if own and not living:
                return self._respawn(job, own[0])
            if own and living[0].run_id == job.run_id:
                return _handle(job, living[0])
            if not own and (handle := self._begin(job, _free_name(job, panes))) is not None:
                return handle
            if time.monotonic() > deadline:
                others = ", ".join(f"{pane.run_id} in {pane.session}" for pane in living)
                raise LaunchError(f"{job.name}: a former run still lives, {others}; end it")
            time.sleep(_PAUSE_SECONDS)  # its exit is recorded, its process is just ending

    def _begin(self, job: Job, name: str) -> Handle | None:
        """Start a run in a new session; None when somebody has taken its name by now."""
        reply = self._tmux(*new_session(job, name))
        if reply.returncode == 0:
            return _handle(job, Pane.parse(reply.stdout[0]))
        if any("duplicate session" in line for line in reply.stderr):
            return None
        if reply.stdout:  # it has started, without one of its options
            self._tmux("kill-pane", "-t", Pane.parse(reply.stdout[0]).pane)
        raise LaunchError(f"tmux cannot start {name}: {reply.why}")

    def _respawn(self, job: Job, pane: Pane) -> Handle:
        """Start a run in the dead pane of a former one: whoever is attached stays attached."""
        reply = self._tmux(
            *("respawn-pane", "-k", "-t", pane.pane, "--", *runner_of(job)),
            *settings(job, pane.pane),
            *(";", "display-message", "-p", "-t", pane.pane, PANE_FORMAT),
        )
        if reply.returncode != 0:
            raise LaunchError(f"tmux cannot restart {pane.session}: {reply.why}")
        return _handle(job, Pane.parse(reply.stdout[0]))

    def _named(self, handle: Handle) -> Handle:
        """The handle with its session's name of today, which the run's folder does not know."""
        with contextlib.suppress(LaunchError):
            for pane in self._panes():
                here = (pane.pane, pane.server_pid, pane.run_id)
                if here == (handle.pane, handle.server_pid, handle.run_id):
                    return replace(handle, session=pane.session)
        return handle

    def _panes(self) -> list[Pane]:
        return self._server.panes()

    def _tmux(self, *words: str) -> Reply:
        return self._server.ask(*words)


def _ending(handle: Handle) -> list[str]:
    """The command that ends a run's pane, and tells that it has, if it is over and nobody looks."""
    ours = f"#{{==:#{{{RUN_OPTION}}},{handle.run_id}}}"
    over = "#{&&:#{pane_dead},#{==:#{session_attached},0}}"
    end = f"display-message -p {handle.run_id} ; kill-pane -t {handle.pane}"
    return ["if-shell", "-F", "-t", f"{handle.pane}", f"#{{&&:{ours},{over}}}", end]


def _is_own(pane: Pane, job: Job) -> bool:
    """Whether a pane is, or was, of the same skill of the same graph."""
    if pane.folder != graph_folder(job):
        return False
    return re.fullmatch(rf"{re.escape(plain(job.name))}(_\d+)?", pane.session) is not None


def _free_name(job: Job, panes: Collection[Pane]) -> str:
    """The job's name, with the first free number if somebody else uses it."""
    name, taken = plain(job.name), {pane.session for pane in panes}
    if name not in taken:
        return name
    return next(other for n in count(2) if (other := f"{name}_{n}") not in taken)


def _handle(job: Job, pane: Pane) -> Handle:
    return Handle(
        run_id=job.run_id,
        session=pane.session,
        pid=pane.pid,
        birth=processes.birth_of(pane.pid),
        pane=pane.pane,
        server_pid=pane.server_pid,
    )


def _are_safe(run: Job) -> bool:
    """Names go into tmux targets and formats, where other characters have a meaning."""
    return all(_SAFE.fullmatch(word) for word in (run.name, run.run_id))
