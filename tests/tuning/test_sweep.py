"""A sweep in real processes: its trials, what it records, and how it goes on after a kill."""

from __future__ import annotations

import json
import os
import random
import subprocess
import time

import pytest

from tests.tuning.stand_in import Place

VARY = ("--vary", "lr=log:1e-4:1e-1", "--skill", "Collect Wood", "--total_timesteps", "10k")
QUICK = (*VARY, "--method=random", "--confirm=0", "--launcher=local")


@pytest.fixture
def place(tmp_path) -> Place:
    return Place(tmp_path)


def test_a_sweep_trains_its_trials_and_names_the_best(place):
    code, printed, said = place.run(*QUICK, "--trials=4")
    assert code == 0, said
    trials, outcomes = place.records(), place.records("outcome.json")
    assert sorted(place.launches()) == ["0", "1", "2", "3"]
    assert trials[0]["point"] == {"lr": 1e-3}  # the default comes first
    assert len({trial["seed"] for trial in trials.values()}) == 4
    scores = {number: outcome["score"] for number, outcome in outcomes.items()}
    best = max(scores, key=lambda number: scores[number])
    assert printed.startswith(f"trial {best}: {scores[best]:.3f} (lr ")
    for number, trial in trials.items():
        assert sorted(trial["ended"] + trial["pending"]) == list(range(number))


def test_the_same_flags_again_change_nothing(place):
    assert place.run(*QUICK, "--trials=2")[0] == 0
    first = place.records(), place.records("outcome.json")
    code, printed, said = place.run()
    assert code == 0, said
    assert printed.startswith("trial ")
    assert (place.records(), place.records("outcome.json")) == first
    assert len(place.launches()) == 2


def test_trials_that_diverge_have_no_score_and_end_the_search(place):
    place.order(diverge_above=0.0)
    code, _, said = place.run(*QUICK, "--trials=9", "--max_failures=2", "--max_retries=0")
    assert code == 1, said
    outcomes = place.records("outcome.json").values()
    assert 2 <= len(outcomes) <= 3
    assert {outcome["score"] for outcome in outcomes} == {None}
    assert all("65" in outcome["why"] for outcome in outcomes)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--vary", "lr=log:1e-2:1e-4"), "min 0.01 must be below max 0.0001"),
        (("--vary", "layer_size=pow2:32:64"), "the same for all experts"),
        (("--vary", "lr=log:1e-4:1e-2", "--budget=7x"), "--budget 7x is neither a time"),
        ((), "say what is varied"),
        (("--vary", "lr=log:1e-4:1e-2", "--skill=Collect Wod"), "there is no skill 'Collect Wod'"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(place, words, why):
    skill = () if any("--skill" in word for word in words) else ("--skill=Collect Wood",)
    code, _, said = place.run(*skill, *words)
    assert code == 2, said
    assert why in said.splitlines()[-1]
    assert not place.layout.root.exists()


def test_other_flags_than_those_it_was_begun_with_are_refused(place):
    place.run(*QUICK, "--trials=1")
    for words in (("--trials=3",), ("--lr=1e-2",), ("--vary", "gamma=uniform:0.9:0.99")):
        code, _, said = place.run(*words)
        assert code == 2
        assert "is not what" in said
    assert len(place.launches()) == 1


def test_torn_and_foreign_trials_are_left_out_and_said(place):
    place.run(*QUICK, "--trials=3")
    torn = place.sweep.training_runs / "1" / "trial.json"
    torn.write_text(torn.read_text()[:40])
    foreign = place.sweep.training_runs / "2" / "trial.json"
    foreign.write_text(foreign.read_text().replace('"number": 2', '"number": 3'))
    code, _, said = place.run()
    assert code == 0
    assert "trial 1: " in said
    assert "trial 2: " in said
    trials = place.records("outcome.json")
    assert sorted(trials) == [0, 1, 2, 3, 4]  # two others take their place
    assert place.launches() == ["0", "1", "2", "3", "4"] or len(place.launches()) == 5
    assert json.loads((place.sweep.training_runs / "3" / "trial.json").read_text())["ended"] == [0]


def test_a_second_sweep_of_one_name_is_refused_and_names_the_holder(place):
    place.order(update_seconds=0.5)
    first = place.start(*QUICK, "--trials=1")
    try:
        while not place.launches():
            assert first.poll() is None
        code, _, said = place.run(*QUICK)
        assert code == 75
        assert str(first.pid) in said
    finally:
        first.terminate()
        first.communicate()


def test_a_sweep_that_is_killed_again_and_again_is_like_one_that_was_not(place, tmp_path):
    kill_and_compare(place, Place(tmp_path / "whole"), kills=3, trials=4, flags=QUICK)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_sweep_in_tmux_survives_thirty_kills(place, tmp_path, socket):
    flags = (*VARY, "--method=random", "--confirm=0", f"--tmux_socket={socket}")
    kill_and_compare(place, Place(tmp_path / "whole"), kills=30, trials=12, flags=flags)
    listed = subprocess.run(
        ["tmux", "-S", socket, "list-sessions"], capture_output=True, text=True, check=False
    )
    assert "flowrl" not in listed.stdout


@pytest.fixture
def socket(tmp_path):
    path = str(tmp_path / "tmux")
    yield path
    subprocess.run(["tmux", "-S", path, "kill-server"], capture_output=True, check=False)


def kill_and_compare(place: Place, whole: Place, *, kills: int, trials: int, flags) -> None:
    """Kill the sweeper at random instants; its trials are those of a sweep that was left alone."""
    flags = (*flags, "--max_concurrent=1", f"--trials={trials}")
    seed = int.from_bytes(os.urandom(4))
    instants = random.Random(seed)
    for each in (place, whole):
        each.order(update_seconds=0.2)
    for _ in range(kills):
        sweeper = place.start(*flags)
        time.sleep(instants.uniform(0.3, 3.0))
        sweeper.kill()
        sweeper.communicate()
    code, _, said = place.run(*flags)
    assert code == 0, (seed, said)
    whole.order(update_seconds=0.0)
    assert whole.run(*flags)[0] == 0

    def points(of: Place) -> dict[int, tuple]:
        return {n: (trial["point"], trial["seed"]) for n, trial in of.records().items()}

    assert points(place) == points(whole), seed
    scores = [
        {n: outcome["score"] for n, outcome in of.records("outcome.json").items()}
        for of in (place, whole)
    ]
    assert scores[0] == scores[1], seed
    assert sorted(place.launches(), key=int) == [str(n) for n in range(trials)], seed
