"""Ray Tune runs the trials of a sweep in processes of its own."""

from __future__ import annotations

import pytest

from tests.tuning.place import Place

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
    assert "ended, 3 of 3 trials" in printed
    assert not (place.sweep.root / "ray").exists()


def test_pruning_is_not_for_ray(tmp_path):
    place = Place(tmp_path)
    code, _, said = place.run(*FLAGS, "--engine=ray", "--pruner=asha")
    assert code == 2
    assert "--engine ray ends no trial early" in said
    assert not place.layout.root.exists()
