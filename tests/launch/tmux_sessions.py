"""What the tests of tmux ask a server."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from flowrl.launch.job import Exited, Outcome, Why
from flowrl.launch.tmux import TmuxLauncher
from tests.launch.conftest import until


def why(outcome: Outcome) -> Why:
    assert isinstance(outcome, Exited)
    return outcome.why


def sessions(tmux: TmuxLauncher) -> list[str]:
    return tmux._tmux("list-sessions", "-F", "#{session_name}").stdout


@contextmanager
def somebody_attached(tmux: TmuxLauncher, session: str) -> Iterator[None]:
    """A client in control mode: tmux counts it as attached, and it needs no terminal."""
    client = subprocess.Popen(
        ["tmux", "-L", "test", "-C", "attach", "-t", f"={session}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )
    until(
        lambda: (
            tmux._tmux("display-message", "-p", "-t", f"={session}:", "#{session_attached}").stdout
            == ["1"]
        )
    )
    try:
        yield
    finally:
        client.kill()
        client.communicate()
