"""What the tests of tmux ask a server."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from flowrl.launchers.base import ExitCause, Exited, Outcome
from flowrl.launchers.tmux import TmuxLauncher
from tests.launchers.conftest import until


def cause_of(outcome: Outcome) -> ExitCause:
    assert isinstance(outcome, Exited)
    return outcome.cause


def sessions(tmux: TmuxLauncher) -> list[str]:
    return tmux.server.run("list-sessions", "-F", "#{session_name}").stdout.splitlines()


@contextmanager
def somebody_attached(tmux: TmuxLauncher, session: str) -> Iterator[None]:
    """A client with a terminal of its own, as a person's.

    Not one in control mode: tmux 3.3a crashes when something happens while such a client says who
    it is.
    """
    screen, terminal = os.openpty()
    client = subprocess.Popen(
        ["tmux", "-L", "test", "attach", "-t", f"={session}"],
        env={**os.environ, "TERM": "xterm"},
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
    )
    os.close(terminal)
    until(
        lambda: (
            tmux.server.run(
                "display-message", "-p", "-t", f"={session}:", "#{session_attached}"
            ).stdout
            == "1\n"
        )
    )
    try:
        yield
    finally:
        client.kill()
        client.wait()
        os.close(screen)
