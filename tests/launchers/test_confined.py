"""A confined process: what a terminal shows of it, and its end with the one that waits for it."""

from __future__ import annotations

import logging
import os
import pty
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from flowrl.launchers.confined import ENDED, EPISODES, confined_run
from flowrl.paths import GraphPaths
from tests.waiting import until

ROOT = Path(__file__).parents[2]
CODE = (
    "import sys; from tests.launchers.test_confined import play; "
    "sys.stdout.buffer.write(play(sys.argv[1], float(sys.argv[2]), sys.argv[3]))"
)


@dataclass(frozen=True)
class PlaySlowly:
    """An order to say that three episodes have ended, to make a file, and to wait."""

    begun: str
    seconds: float

    def work(self) -> int:
        logging.getLogger("flowrl").info("first")
        for number in (1, 2):
            logging.getLogger(EPISODES).debug(ENDED, number)
        with suppress(OSError):  # a sandbox
            Path(self.begun).touch()
        time.sleep(self.seconds)
        sys.stdout.write("done")
        return 0


def play(begun: str, seconds: float, how: str) -> bytes:
    graph_paths = GraphPaths(Path(begun).parent)
    order = PlaySlowly(begun=begun, seconds=seconds)
    return confined_run(order, graph_paths, None, how=how, episodes=4)  # type: ignore[arg-type]


def words(folder: Path, seconds: float, how: str) -> list[str]:
    return [sys.executable, "-c", CODE, str(folder / "begun"), str(seconds), how]


def on_a_terminal(command: list[str], **how: Any) -> tuple[bytes, bytes]:
    """What a command prints, and what its standard error shows, which is a terminal."""
    own, terminal = pty.openpty()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=terminal, **how) as process:
        os.close(terminal)
        shown = b""
        with suppress(OSError):  # its other end is closed
            while part := os.read(own, 65536):
                shown += part
        assert process.stdout is not None
        printed = process.stdout.read()
    os.close(own)
    return printed, shown


def test_a_terminal_shows_how_many_episodes_have_ended(tmp_path):
    printed, shown = on_a_terminal(words(tmp_path, 1.0, "none"), cwd=ROOT)
    assert printed == b"done"
    assert b"its programs are loaded or compiled" in shown
    assert b"0/4" in shown
    assert b"episodes are played" in shown
    assert b"3/4" in shown
    assert b"first" in shown
    assert b"have ended" not in shown


def test_elsewhere_its_log_alone_is_shown(tmp_path):
    done = subprocess.run(
        words(tmp_path, 0.0, "none"), cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "done"
    assert [line.split(" ", 1)[1] for line in done.stderr.splitlines()] == ["first"]


@pytest.mark.parametrize("how", ["none", "bwrap"])
def test_it_ends_with_the_process_that_waits_for_it(tmp_path, how):
    if how == "bwrap" and not shutil.which("bwrap"):
        pytest.skip("bubblewrap is not installed")
    waiting = subprocess.Popen(words(tmp_path, 600.0, how), cwd=ROOT, stderr=subprocess.DEVNULL)
    try:

        def children() -> list[psutil.Process]:
            """The processes below it, once the order is under way."""
            with suppress(psutil.NoSuchProcess):  # those that try the sandbox out end by themselves
                own = psutil.Process(waiting.pid).children(recursive=True)
                inner = [one for one in own if "PlaySlowly" in one.cmdline() and not one.children()]
                begun = (tmp_path / "begun").exists() or how == "bwrap"
                return own if inner and begun else []
            return []

        below = until(children)
        waiting.kill()
        waiting.wait()
        until(lambda: not any(one.is_running() and one.status() != "zombie" for one in below))
    finally:
        waiting.kill()
        waiting.wait()
