"""`--analyse_at`: a real scheduler over stand-ins of trainers and of `flowrl analyse`.

The real ones are in tests/analysis.
"""

from __future__ import annotations

import json
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

DRINK = "Collect Drink"
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


@pytest.mark.parametrize("rate", [0.05, 0.1])
def test_a_run_that_spent_its_frames_is_trained_on_only_with_more(place, rate):
    """It came to `--analyse_at` with its last frame, or not at all."""
    place.order({WOOD: {"success_rate": rate, "acted": {"0": 10_000_000}}})
    words = (*WORDS, f"--target_skill={WOOD}", "--strict")
    for _ in range(2):
        assert place.run(*words)[0] == 1, "it is below the whole goal"
    assert place.launches() == [WOOD]
    place.order()
    assert place.run(*words, "--total_timesteps=20_000_000")[0] == 0
    assert place.launches() == [WOOD, WOOD]
    assert analyses(place) == []


def test_a_run_that_came_to_the_whole_goal_at_once_is_analysed_as_any_other(place):
    place.order({WOOD: {"overshoots": True}})
    for _ in range(2):
        assert place.run(*WORDS, f"--target_skill={WOOD}", "--strict")[0] == 0
    assert place.launches() == [WOOD, WOOD]
    assert len(analyses(place)) == 1


@pytest.mark.parametrize("words", [(), ("--analyse_at=0.2",)])
def test_a_run_goes_on_whatever_a_later_start_says_of_analyses(place, words):
    place.order({WOOD: {"gate": "trained"}})
    target = ("--launcher=local", f"--target_skill={WOOD}", "--strict")
    daemon = place.start(*WORDS, f"--target_skill={WOOD}")
    until(place.launches)
    daemon.kill()
    assert ended(daemon)[0] == -signal.SIGKILL
    later = place.start(*target, *words)
    until(lambda: place.statuses().get(WOOD) == "running")
    place.open("trained")
    assert ended(later)[0] == 0
    assert place.launches() == [WOOD, WOOD]
    assert len(analyses(place)) == len(words)
    last = read_run(place.graph_paths.archive(0, WOOD))
    assert last.config["success_state_rate"] == 0.8
    assert last.origins["total_timesteps"] == "--analyse_at"


def test_a_skill_that_a_start_does_not_ask_for_is_not_analysed(place):
    place.order({WOOD: {"gate": "trained"}})
    daemon = place.start(*WORDS, f"--target_skill={WOOD}")
    until(place.launches)
    daemon.kill()
    assert ended(daemon)[0] == -signal.SIGKILL
    place.open("trained")
    assert place.run(*WORDS, f"--target_skill={DRINK}")[0] == 0
    assert place.launches() == [WOOD, DRINK, DRINK]
    assert place.run(*WORDS, f"--target_skill={WOOD}")[0] == 0
    assert place.launches() == [WOOD, DRINK, DRINK, WOOD]


def test_a_skill_that_is_analysed_is_told_of_once_and_below_its_goal_until_then(place):
    place.order({WOOD: {"analysis_gate": "analysed"}})
    told = place.folder / "told"
    daemon = place.start(*WORDS, f"--target_skill={WOOD}", f"--notify=tee -a {told}")
    until(lambda: notices.read(place.graph_paths).get(ANALYSING) == f"analysed now: {WOOD}")
    assert place.run(*WORDS, f"--target_skill={WOOD}")[0] != 0, "another scheduler has the folder"
    assert ANALYSING in notices.read(place.graph_paths)
    assert place.lines()[WOOD]["success_rate"] == 0.1
    assert place.lines()[WOOD]["goal"] == 0.8
    place.open("analysed")
    assert ended(daemon)[0] == 0
    assert ANALYSING not in notices.read(place.graph_paths)
    lines = [json.loads(line) for line in told.read_text().splitlines()]
    assert [line["event"] for line in lines] == ["completed", "ended"]
    assert lines[0]["success_rate"] == 0.9


@pytest.mark.parametrize(
    ("words", "frames"),
    [
        (("--total_timesteps=1000",), 900),
        (("--skill_timesteps_budget=500",), 400),
        (("--skill_timesteps_budget=80",), None),
    ],
)
def test_the_frames_left_are_those_of_the_start_that_trains_a_skill_on(place, words, frames):
    place.order({WOOD: {"analysis_gate": "analysed"}})
    daemon = place.start(*WORDS, f"--target_skill={WOOD}")
    until(lambda: analyses(place))
    daemon.kill()
    assert ended(daemon)[0] == -signal.SIGKILL
    place.open("analysed")
    code = place.run(*WORDS, f"--target_skill={WOOD}", *words, "--strict")[0]
    assert code == (1 if frames is None else 0)
    last = read_run(place.graph_paths.archive(0, WOOD)).config
    assert last["total_timesteps"] == (10_000_000 if frames is None else frames)


def test_a_failed_attempt_counts_in_the_budget_of_both_runs(place):
    place.order({WOOD: {"fails": 1}})
    words = (*WORDS, f"--target_skill={WOOD}", "--skill_timesteps_budget=500", "--retry_backoff=0")
    assert place.run(*words)[0] == 0
    last = read_run(place.graph_paths.archive(0, WOOD)).config
    assert last["total_timesteps"] == 500 - 100 - 10, "each attempt tells of 10 frames"


def test_a_first_run_after_a_rollback_has_all_its_frames(place):
    words = ("--launcher=local", f"--target_skill={WOOD}")
    place.order({WOOD: {"analysis_gate": "analysed"}})
    assert place.run("--launcher=local", f"--target_skill={DRINK}")[0] == 0
    daemon = place.start(*WORDS, f"--target_skill={WOOD}")
    until(lambda: analyses(place))
    daemon.kill()
    assert ended(daemon)[0] == -signal.SIGKILL
    rollback = [sys.executable, "-m", "flowrl", "rollback", str(place.graph_paths.root), "1"]
    subprocess.run(rollback, check=True)
    assert place.run(*words)[0] == 0
    last = read_run(place.graph_paths.archive(1, WOOD))
    assert last.config["total_timesteps"] == 10_000_000
    assert "total_timesteps" not in last.origins


def test_what_is_known_of_early_runs_outlives_the_state(place):
    """A skill that is to be trained on is not forgotten, and one that was is not trained again."""
    place.order({WOOD: {"analysis_gate": "analysed", "success_rate": 0.5}})
    words = (*WORDS, f"--target_skill={WOOD}")
    daemon = place.start(*words)
    until(lambda: analyses(place))
    daemon.kill()
    assert ended(daemon)[0] == -signal.SIGKILL
    place.open("analysed")
    for _ in range(2):
        place.graph_paths.scheduler_state.unlink()
        assert place.run(*words)[0] == 0
        assert place.launches() == [WOOD, WOOD]


def test_a_skill_that_a_user_trains_on_meanwhile_is_told_of(place):
    place.order({WOOD: {"analysis_gate": "analysed"}})
    told = place.folder / "told"
    daemon = place.start(*WORDS, f"--target_skill={WOOD}", f"--notify=tee -a {told}")
    until(lambda: analyses(place))
    graph = str(place.graph_paths.root)
    subprocess.run([sys.executable, "-m", "flowrl", "train-more", graph, WOOD], check=True)
    until(lambda: told.exists() and "completed" in told.read_text())
    place.open("analysed")
    assert ended(daemon)[0] == 0
    assert place.launches() == [WOOD, WOOD]
    last = read_run(place.graph_paths.archive(0, WOOD)).config
    assert last["total_timesteps"] == 10_000_000 - 100


def test_an_analysis_ends_with_its_scheduler_and_the_next_start_begins_it_again(place):
    """One is killed, one is stopped; the skill that waits for its need goes on meanwhile."""
    place.order({WOOD: {"analysis_gate": "analysed"}})
    words = (*WORDS, f"--target_skill={TABLE}", "--needs_success_rate=0.1")
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
        assert (ANALYSING in notices.read(place.graph_paths)) == (code < 0)
    place.open("analysed")
    assert place.run(*words)[0] == 0
    assert sorted(place.launches()) == [WOOD, WOOD, TABLE, TABLE]
