"""Sessions that are begun while their runs' folders are being made.

A client of tmux and the start of a Python together take a third of the time from a run's end to its
dependant's start. So the session of a run that will be launched in a moment is begun at once. Its
runner waits for spec.json (`launchers/early.py`): to write it is to launch the run, as ever, and
where it never comes nothing was launched.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from flowrl import storage
from flowrl.errors import LaunchError
from flowrl.launchers import processes, spec
from flowrl.launchers.expecting import Expected
from flowrl.launchers.job import Job
from flowrl.launchers.tmux_server import Client, Pane, TmuxServer
from flowrl.launchers.tmux_words import cat_into, new_session, plain, runner_of
from flowrl.paths import RunPaths


@dataclass(slots=True)
class _Begun:
    run: Expected
    pipe: Path  # of the log
    client: Client
    heard: bool = False
    pane: Pane | None = None  # None as long as the client is not heard
    whole: bool = False  # it has all its options


class SessionsAhead:
    """The sessions on one server that wait for the runs of this process."""

    def __init__(self, server: TmuxServer) -> None:
        self._server = server
        self._begun: dict[Path, _Begun] = {}  # by the run's folder

    def begin(self, run: Expected) -> None:
        """Begin a session, unless its name is taken, tmux is missing, or an old spec is there."""
        if run.folder in self._begun or not spec.is_missing(run.folder) or not shutil.which("cat"):
            return
        pipe = RunPaths(run.folder, expert=0).log_pipe
        if not run.folder.exists():
            pipe = run.folder.with_name(f".tmp-{run.folder.name}.pipe")  # which a start sweeps away
        us = os.getpid()
        waiting = (str(us), processes.birth_of(us), str(pipe.absolute()))
        words = new_session(
            run, plain(run.name), runner=runner_of(run, *waiting), log=cat_into(pipe.absolute())
        )
        with suppress(OSError, LaunchError):
            storage.make_pipe(pipe)
            self._begun[run.folder] = _Begun(run, pipe, self._server.begin(*words))

    def pane_of(self, job: Job) -> Pane | None:
        """The pane whose runner waits for this job, if there is one; any other one ends.

        Raises:
          LaunchError: tmux does not answer.
        """
        begun = self._begun.get(job.folder)
        if begun is None:
            return None
        pane = self._heard(begun)
        fits = begun.whole and begun.run.run_id == job.run_id
        if fits and pane and processes.birth_of(pane.pid):
            return pane
        self._end(self._begun.pop(job.folder))
        return None

    def forget(self, job: Job) -> None:
        """Leave the session to its run."""
        del self._begun[job.folder]

    def end(self) -> None:
        """End the sessions whose runs have not been launched."""
        left, self._begun = self._begun, {}
        for begun in left.values():
            with suppress(LaunchError):
                self._end(begun)

    def _end(self, begun: _Begun) -> None:
        try:
            pane = self._heard(begun)
            if pane is not None:
                ours = f"#{{==:#{{pane_pid}},{pane.pid}}}"
                end = f"kill-pane -t {pane.pane}"
                self._server.ask("if-shell", "-F", "-t", pane.pane, ours, end)
        finally:
            with suppress(OSError):
                storage.remove_pipe(begun.pipe)

    def _heard(self, begun: _Begun) -> Pane | None:
        """The pane that tmux has made; None when it has refused."""
        if not begun.heard:
            begun.heard = True
            reply = self._server.answer(begun.client)
            begun.whole = reply.returncode == 0
            begun.pane = Pane.parse(reply.stdout[0]) if reply.stdout else None
        return begun.pane
