"""A real daemon, steered from another terminal while it runs and while it is down."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import pytest

from flowrl import cli
from flowrl.errors import EXIT_RESUMABLE
from tests.launchers.conftest import until
from tests.parallel.making import WOOD
from tests.parallel.stand_in_story import Place, ended

LOCAL = ("--launcher=local", "--retry_backoff=0.05", f"--target_skill={WOOD}")
WAIT = ("--wait", "60", "--json")


@pytest.fixture
def place(tmp_path):
    place = Place(tmp_path)
    place.order({WOOD: {"gate": "gate"}})
    yield place
    for daemon in place.daemons:
        daemon.kill()
        daemon.communicate()


def say(place, capsys, *words):
    """A command's exit code and what it said."""
    code = cli.main([*words, "--graph-path", str(place.layout.root)])
    return code, capsys.readouterr().out


def test_a_daemon_is_paused_resumed_and_stopped_from_another_terminal(place, capsys):
    daemon = place.start(*LOCAL)
    until(lambda: place.statuses().get(WOOD) == "running" and place.launches(), seconds=60)
    code, said = say(place, capsys, "pause", WOOD, *WAIT)
    facts = json.loads(said)
    assert (code, facts["outcome"]) == (0, "done")
    assert facts["daemon"]["pid"] == daemon.pid
    assert ended(daemon)[0] == 1, "nothing is left that moves"
    assert place.lines()[WOOD]["why"] == "paused on request"

    code, said = say(place, capsys, "resume", WOOD)
    assert code == 0
    assert "done when you start" in said
    code, said = say(place, capsys, "priority", WOOD, "5", "--wait", "0.2")
    assert (code, "done when you start" in said) == (75, True)

    daemon = place.start(*LOCAL)
    until(lambda: len(place.launches()) == 2, seconds=60)
    assert place.lines()[WOOD]["priority"] == 5
    code, said = say(place, capsys, "stop", "--now", *WAIT)
    assert (code, json.loads(said)["outcome"]) == (0, "done")
    assert ended(daemon)[0] == EXIT_RESUMABLE

    place.open("gate")
    code, said = place.run(*LOCAL)
    assert code == 0, said
    assert len(place.merged()) == 1
    assert place.merged()[0].startswith("e0.a1."), "it was one attempt all along"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_program_that_is_interrupted_before_its_story_leaves_no_traceback(number):
    slow = (
        "import sys, time; from flowrl import console; from flowrl.config import BottomUpConfig\n"
        "def parse(*args, **facts):\n"
        "    print('parsing', flush=True)\n"
        "    time.sleep(60)\n"
        "console.parse = parse\n"
        "sys.exit(console.run_program('x', BottomUpConfig, lambda config: 0, []))"
    )
    program = subprocess.Popen(
        [sys.executable, "-c", slow], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert program.stdout is not None
    assert program.stdout.readline() == "parsing\n"
    began = time.monotonic()
    program.send_signal(number)
    _, said = program.communicate(timeout=30)
    assert (program.returncode, said) == (130, "")
    assert time.monotonic() - began < 20
