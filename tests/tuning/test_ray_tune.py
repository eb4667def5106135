"""Ray Tune runs the trials of a sweep in processes of its own."""

from __future__ import annotations

import re
import signal

import pytest

from flowrl import cli, notices
from tests.tuning.place import Place
from tests.waiting import limit, until

pytest.importorskip("ray.tune", reason="Ray Tune is not installed", exc_type=ImportError)
FLAGS = ("--vary", "lr=log:1e-4:1e-1", "--skill", "Collect Wood", "--total_timesteps", "10k")


@pytest.mark.timeout(280)
def test_two_workers_of_ray_search_and_confirm_and_a_sweep_goes_on_where_it_stood(tmp_path):
    place = Place(tmp_path)
    flags = (*FLAGS, "--engine=ray", "--method=random", "--trials=3", "--confirm=2")
    place.order(update_seconds=0.1)
    code, _, said = place.run(*flags, "--timeout=1e-9")
    assert code == 85, said
    assert place.launches() == []
    code, printed, said = place.run(*flags)
    assert code == 0, said
    outcomes = place.records("outcome.json")
    assert len(outcomes) == len(place.launches()) == len(set(place.launches()))
    assert all(outcome["score"] > 0 for outcome in outcomes.values())
    trials = place.records()
    assert any(trial["pending"] for trial in trials.values())  # two at a time
    assert {trial["confirms"] for trial in trials.values()} == {False, True}
    assert printed.startswith("Collect Wood: ended, 3 of 3 trials")  # and no tables of Ray's
    assert not (place.sweep_paths.root / "ray").exists()


@pytest.mark.timeout(280)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_sweep_of_ray_ends_when_asked_or_broken_and_goes_on(tmp_path, number):
    place = Place(tmp_path)
    place.order(update_seconds=2.0)
    flags = (*FLAGS, "--engine=ray", "--method=random", "--trials=3", "--confirm=0")
    process = place.start(*flags)
    until(lambda: len(place.launches()) == 3, seconds=200)
    told = re.compile("Collect Wood: searching, .* of [23] trials have ended")  # while it runs
    until(lambda: told.search(notices.read(place.sweep_paths).get(notices.SWEEP, "")))
    process.send_signal(number)
    _, said = process.communicate(timeout=limit(120))
    assert process.returncode == (85 if number == signal.SIGINT else -number), said

    run_json = place.sweep_paths.training_runs / "2" / "run.json"
    until(run_json.with_name("result.json").exists, seconds=100)  # its trainer goes on
    whole = run_json.read_text()
    run_json.write_text("{")
    code, _, said = place.run(*flags)
    assert code == 1
    assert "could not be run" in said.splitlines()[-1]
    assert str(run_json) in said.splitlines()[-1]
    assert 2 not in place.records("outcome.json")

    run_json.write_text(whole)
    code, _, said = place.run(*flags)
    assert code == 0, said
    assert sorted(place.records("outcome.json")) == [0, 1, 2]
    assert set(place.launches()) == {"0", "1", "2"}  # trainers end with Ray, and go on


@pytest.mark.timeout(120)
def test_a_stop_lets_rays_trials_end_and_a_failed_trial_has_no_score(tmp_path):
    place = Place(tmp_path)
    place.order(update_seconds=0.3, diverge_above=0.0)
    process = place.start(*FLAGS, "--engine=ray", "--method=random", "--confirm=0")
    until(lambda: len(place.launches()) == 2, seconds=200)
    assert cli.main(["stop", str(place.sweep_paths.root)]) == 0
    _, said = process.communicate(timeout=limit(120))
    assert process.returncode == 85, said
    assert {each["score"] for each in place.records("outcome.json").values()} == {None}
    assert len(place.launches()) <= 3


def test_pruning_is_not_for_ray(tmp_path):
    place = Place(tmp_path)
    code, _, said = place.run(*FLAGS, "--engine=ray", "--pruner=asha")
    assert code == 2
    assert "--engine ray ends no trial early" in said
    assert not place.graph_paths.root.exists()
