"""`--analyse_at`: a real scheduler over stand-ins of trainers and of `flowrl analyse`.

The real ones are in tests/analysis.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import suppress

import psutil
import pytest

from flowrl import notices
from flowrl.errors import EXIT_RESUMABLE
from flowrl.parallel.analysing import ANALYSING
from flowrl.runs import read_run
from tests.parallel.making import TABLE, WOOD
from tests.parallel.stand_in_story import Place, ended
from tests.waiting import until

WORDS = ("--launcher=local", "--analyse_at=0.1")


@pytest.fixture
def place(tmp_path):
    made = Place(tmp_path)
    yield made
    made.end()


def analyses(place: Place) -> list[str]:
    """The skills and flags of all analyses that were begun."""
    path = place.folder / "analyses"
    return path.read_text().splitlines() if path.exists() else []


def analyses_now(process: psutil.Process) -> bool:
    with suppress(psutil.Error):  # a session that has ended
        return "analyse" in process.cmdline()
    return False


def test_each_skill_is_analysed_and_trained_on_once(place):
    place.order({WOOD: {"analysis_code": 3}})
    for number in range(2):
        assert place.run(*WORDS, f"--target_skill={TABLE}")[0] == 0
        told = notices.read(place.graph_paths)
        failed = f"{WOOD} is not analysed: exit code 3: it was ordered to end"
        assert told.get(ANALYSING) == (failed if number == 0 else None)
    assert sorted(place.launches()) == [WOOD, WOOD, TABLE, TABLE]
    assert analyses(place) == [f"{name} --apply --episodes=480" for name in (WOOD, TABLE)]
    for number, skill in enumerate((WOOD, TABLE)):
        last = read_run(place.graph_paths.archive(number, skill)).config
        assert last["success_state_rate"] == 0.8
        assert last["total_timesteps"] == 10_000_000 - 100, "its first run took 100"


def test_both_runs_together_stay_within_the_budget_of_a_skill(place):
    words = (*WORDS, f"--target_skill={WOOD}", "--skill_timesteps_budget=500")
    assert place.run(*words)[0] == 0
    assert place.launches() == [WOOD, WOOD]
    last = read_run(place.graph_paths.archive(0, WOOD)).config
    assert last["total_timesteps"] == 500 - 100


def test_a_run_that_did_not_come_so_far_is_not_followed_by_another(place):
    place.order({WOOD: {"success_rate": 0.05}})
    for _ in range(2):
        assert place.run(*WORDS, f"--target_skill={WOOD}")[0] == 0
    assert place.launches() == [WOOD]
    assert analyses(place) == []


def test_an_analysis_ends_with_its_scheduler_and_the_next_start_begins_it_again(place):
    """One is killed, one is stopped; the skill that waits for its need goes on meanwhile."""
    place.order({WOOD: {"analysis_gate": "analysed"}})
    words = (*WORDS, f"--target_skill={TABLE}")
    stop = [sys.executable, "-m", "flowrl", "stop", str(place.graph_paths.root)]
    for number, code in enumerate((-signal.SIGKILL, EXIT_RESUMABLE), start=1):
        daemon = place.start(*words)
        until(lambda number=number: len(analyses(place)) == number)
        [child] = [each for each in psutil.Process(daemon.pid).children() if analyses_now(each)]
        until(lambda: place.launches()[:2] == [WOOD, TABLE])
        if code < 0:
            daemon.kill()
        else:
            subprocess.run(stop, check=True)
        assert ended(daemon)[0] == code
        until(lambda child=child: not child.is_running())
    place.open("analysed")
    assert place.run(*words)[0] == 0
    assert sorted(place.launches()) == [WOOD, WOOD, TABLE, TABLE]
