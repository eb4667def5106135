"""Which trial comes next: a function of the records of those before it."""

from __future__ import annotations

import dataclasses
import errno
import json
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from flowrl.errors import ConfigError, FileRefusedError
from flowrl.measures.objectives import MEASURES, CurvePoint
from flowrl.storage import records
from flowrl.tuning import trials
from flowrl.tuning.search import SearchConfig
from flowrl.tuning.trials import FAILED, TRIAL, BegunTrial, next_trial, read_trials, write_outcome
from tests.tuning.making import a_sweep, a_trial


def test_the_points_that_are_given_come_first_then_the_search(tmp_path):
    sweep = a_sweep(tmp_path, starts=({"lr": 1e-3}, {"lr": 2e-3}))
    first = next_trial(sweep, [], 0)
    second = next_trial(sweep, [BegunTrial(first, None)], 1)
    third = next_trial(sweep, [BegunTrial(first, None), BegunTrial(second, None)], 2)
    assert [first.point, second.point] == [{"lr": 1e-3}, {"lr": 2e-3}]
    assert third.point["lr"] not in (1e-3, 2e-3)
    assert (third.ended, third.pending) == ((), (0, 1))


@pytest.mark.parametrize("torn", [0, 1])
def test_a_given_point_whose_trial_is_torn_is_tried_again(tmp_path, torn):
    sweep = a_sweep(tmp_path, starts=({"lr": 1e-3}, {"lr": 2e-3}))
    left = a_trial(1 - torn, sweep.record.starts[1 - torn]["lr"], 0.5)
    again = next_trial(sweep, [left], 2)
    assert again.point == sweep.record.starts[torn]
    assert next_trial(sweep, [left, BegunTrial(again, None)], 3).point not in sweep.record.starts


def test_a_proposal_is_recomputed_from_the_numbers_that_it_names(tmp_path):
    sweep = a_sweep(tmp_path)
    tried = [a_trial(0, 1e-3, 0.5), a_trial(1, 2e-3, 0.6)]
    third = next_trial(sweep, tried, 2)
    assert trials.propose(sweep, [each for each in tried if each.trial.number in third.ended], 2)
    later = [*tried, a_trial(2, 3e-3, 0.9)]
    known = [each for each in later if each.trial.number in (*third.ended, *third.pending)]
    assert trials.propose(sweep, known, 2) == third


def test_a_run_is_scored_by_the_sweeps_objective(tmp_path):
    curve = [CurvePoint(5_000, 1.0, 0.5, 9.0), CurvePoint(10_000, 2.0, 1.0, 9.0)]
    assert a_sweep(tmp_path).score(curve, 1.0) == 0.5
    fast = a_sweep(tmp_path, objective="success=1,frames=1")
    assert fast.score(curve, 1.0) == (1 + MEASURES["frames"].score(10_000)) / 2
    limited = a_sweep(tmp_path, objective="success=1,frames<=9000")
    assert limited.score(curve, 1.0) == 0


def test_nothing_is_confirmed_before_the_search_has_ended(tmp_path):
    sweep = a_sweep(tmp_path, trials=2)
    running = dataclasses.replace(a_trial(1, 2e-3, 0.1), outcome=None)
    assert next_trial(sweep, [a_trial(0, 1e-4, 0.5), running], 2) is None


def test_the_best_points_are_confirmed_beside_the_default_with_equal_seeds(tmp_path):
    sweep = a_sweep(tmp_path, trials=6)
    lrs = (1e-3, 2e-3, 3e-3, 4e-3, 5e-3, 2e-3)  # the first is the default
    tried = [a_trial(n, lr, 0.9 - n / 10) for n, lr in enumerate(lrs)]
    while trial := next_trial(sweep, tried, len(tried)):
        tried.append(BegunTrial(trial, tried[0].outcome))
    again = [each.trial for each in tried[6:]]
    assert [trial.number for trial in again] == list(range(6, 18))
    assert {trial.repeats for trial in again} == {None, 1, 2, 3}
    by_seed = {
        seed: [trial.repeats for trial in again if trial.seed == seed]
        for seed in {trial.seed for trial in again}
    }
    assert list(by_seed.values()) == [[None, 1, 2, 3]] * 3
    assert not by_seed.keys() & {each.trial.seed for each in tried[:6]}


def test_running_trials_count_with_what_they_may_cost(tmp_path):
    """Trials of 10,000 frames: three at once use up 25k, whatever the number of slots."""
    sweep = a_sweep(tmp_path, trials=9, budget="25k")
    begun: list[BegunTrial] = []
    while trial := next_trial(sweep, begun, len(begun)):
        begun.append(BegunTrial(trial, None))
    assert len(begun) == 3
    begun[0] = BegunTrial(begun[0].trial, a_trial(0, 1e-3, 0.5, frames=4_000).outcome)
    assert next_trial(sweep, begun, 3), "one that ended early makes room"
    timed = a_sweep(tmp_path, trials=9, budget="5s")
    running = dataclasses.replace(a_trial(1, 1e-3), outcome=None)
    assert timed.budget_left([running]) == pytest.approx(8 / 9), "nothing is known of seconds yet"
    assert timed.budget_left([a_trial(0, 1e-3, 0.5), running]) == pytest.approx(1 / 5)


@pytest.mark.parametrize(
    ("changes", "count"),
    [({"trials": 3}, 3), ({"trials": 9, "budget": "25k"}, 3), ({"trials": 9}, 9)],
)
def test_the_search_ends_with_its_trials_or_its_budget(tmp_path, changes, count):
    sweep = a_sweep(tmp_path, confirm=0, **changes)
    tried: list[BegunTrial] = []
    while trial := next_trial(sweep, tried, len(tried)):
        tried.append(BegunTrial(trial, a_trial(0, 1e-3, 0.5).outcome))
    assert len(tried) == count


def test_the_search_ends_when_too_many_trials_have_failed(tmp_path):
    sweep = a_sweep(tmp_path, max_failures=2)
    assert next_trial(sweep, [a_trial(0, 1e-3)], 1)
    assert next_trial(sweep, [a_trial(0, 1e-3), a_trial(1, 1e-3)], 2) is None


def test_a_budget_of_seconds_counts_seconds(tmp_path):
    sweep = a_sweep(tmp_path, budget="4s")
    assert sweep.budget_left([a_trial(0, 1e-3, 0.5)]) == 0.5


def test_records_that_are_not_of_this_sweep_are_left_out_and_named(tmp_path):
    sweep = a_sweep(tmp_path)
    whole = a_trial(0, 1e-3, 0.5).trial
    wrong = {
        1: dataclasses.replace(whole, number=1, sweep="another"),
        2: dataclasses.replace(whole, number=3),
        3: dataclasses.replace(whole, number=3, point={"lr": 5.0}),
        4: dataclasses.replace(whole, number=4, point={"gamma": 0.9}),
    }
    for number, trial in {0: whole, **wrong}.items():
        sweep.run(number).folder.mkdir(parents=True)
        records.write(sweep.run(number).folder / TRIAL, trial)
    sweep.run(5).folder.mkdir()
    tried, left_out = read_trials(sweep)
    assert [each.trial for each in tried] == [whole]
    assert [line.partition(":")[0] for line in left_out] == [f"trial {n}" for n in (1, 2, 3, 4, 5)]


def a_line(frames: int, seconds: float) -> str:
    """A line of metrics.jsonl."""
    names = ("frames", "seconds", "success_rate", "mean_episode_length", "mean_episode_return")
    return json.dumps(dict(zip(names, (frames, seconds, 0.5, 40.0, 0.5), strict=True))) + "\n"


@pytest.mark.parametrize(
    ("last", "cost"), [(a_line(10_000, 2.0), (30_000, 9.0)), ("", (20_000, 7.0))]
)
def test_a_trial_that_fails_costs_what_all_its_attempts_took(tmp_path, last, cost):
    sweep = a_sweep(tmp_path, budget="14s")
    sweep.run(0).folder.mkdir(parents=True)
    (sweep.run(0).folder / FAILED.format(1)).write_text(a_line(5_000, 1.0) + a_line(20_000, 7.0))
    sweep.run(0).metrics.write_text(last)  # the last attempt may have died at once
    found = write_outcome(sweep, 0, why="exit 65")
    assert (found.score, found.frames, found.seconds) == (None, *cost)
    assert sweep.budget_left([BegunTrial(a_trial(0, 1e-3).trial, found)]) <= 0.5


def test_what_cannot_be_read_now_is_no_failure(tmp_path, monkeypatch):
    sweep, whole = a_sweep(tmp_path), a_trial(0, 1e-3, 0.5)
    sweep.run(0).folder.mkdir(parents=True)
    records.write(sweep.run(0).folder / TRIAL, whole.trial)

    def refuse(*_, **__):
        raise FileRefusedError("too many open files") from OSError(errno.EMFILE, "no more")

    with monkeypatch.context() as patch:
        patch.setattr(trials, "read_curve", refuse)
        with pytest.raises(FileRefusedError):
            write_outcome(sweep, 0)
        patch.setattr(trials.records, "read", refuse)
        with pytest.raises(FileRefusedError):
            read_trials(sweep)
    assert read_trials(sweep)[0] == [BegunTrial(whole.trial, None)]


def test_a_grid_goes_on_with_the_point_that_no_trial_has(tmp_path):
    space = {"lr": {"type": "choice", "choices": [1e-4, 1e-3, 1e-2]}}
    sweep = a_sweep(tmp_path, method="grid", trials=100, space=space, confirm=0)
    tried = [a_trial(0, 1e-4, 0.5), a_trial(2, 1e-2, 0.5)]  # the folder of trial 1 is torn
    last = next_trial(sweep, tried, 3)
    assert last.point == {"lr": 1e-3}
    assert next_trial(sweep, [*tried, a_trial(3, 1e-3, 0.5)], 4) is None


def test_the_horizon_is_the_most_that_a_trial_may_take(tmp_path):
    choices = {"total_timesteps": {"type": "choice", "choices": [200_000, 100_000]}}
    assert a_sweep(tmp_path, space=choices).horizon == 200_000
    some = {"total_timesteps": {"type": "log_uniform", "min": 1000, "max": 50_000}}
    assert a_sweep(tmp_path, space=some).horizon == 50_000
    assert a_sweep(tmp_path).horizon == 10_000


def test_a_search_without_limits_has_twenty_trials(tmp_path):
    assert a_sweep(tmp_path, trials=None).most_trials == 20
    assert a_sweep(tmp_path, trials=None, budget="30m").most_trials == 10_000


def test_metrics_that_cannot_be_read_are_a_failure(tmp_path):
    sweep = a_sweep(tmp_path)
    sweep.run(0).folder.mkdir(parents=True)
    sweep.run(0).metrics.write_text("{}\n")
    found = write_outcome(sweep, 0)
    assert found.score is None
    assert "metrics.jsonl:1" in found.why


def test_a_trial_that_no_run_admits_is_never_proposed(tmp_path):
    sweep = a_sweep(tmp_path, space={"num_envs": {"type": "choice", "choices": [63, 65]}})
    base = dataclasses.replace(sweep.base, env_shards=32)
    object.__setattr__(sweep.space, "base", base)
    with pytest.raises(ConfigError, match="finds no point"):
        trials.propose(sweep, [], 0)
    assert next_trial(sweep, [], 0) is None


def test_a_default_that_fails_is_tried_again_before_the_search_and_when_it_confirms(tmp_path):
    sweep = a_sweep(tmp_path, starts=({"lr": 1e-3},), trials=3, max_failures=9)
    tried = [a_trial(0, 1e-3)]
    assert next_trial(sweep, tried, 1).point == {"lr": 1e-3}
    tried += [a_trial(1, 1e-3), a_trial(2, 2e-3, 0.5)]
    killed = 0
    while trial := next_trial(sweep, tried, len(tried)):
        failed = trial.repeats is None and killed < 3
        killed += failed
        tried.append(BegunTrial(trial, tried[0 if failed else 2].outcome))
    defaults = [each for each in tried[3:] if each.trial.repeats is None]
    assert [each.score for each in defaults] == [None, None, None, 0.5, 0.5]
    assert len({each.trial.seed for each in defaults}) == 3  # twice with the first seed


@pytest.mark.parametrize(
    ("asked", "most"), [({"trials": 9}, 9), ({"budget": "40k"}, 6), ({"trials": 6}, 6)]
)
def test_a_sweep_is_prolonged_by_larger_limits(tmp_path, asked, most):
    sweep = a_sweep(tmp_path, trials=6, budget="30k")
    sweep.sweep_paths.outcome_json.write_text("{}")
    later = trials.prolong(sweep, SearchConfig(**asked), asked)
    assert (later.most_trials, later.search.budget) == (most, asked.get("budget", "30k"))
    assert sweep.sweep_paths.outcome_json.exists() == (asked == {"trials": 6})
    assert later.search.confirm == sweep.search.confirm


@pytest.mark.parametrize("asked", [{"trials": 5}, {"budget": "20k"}, {"budget": "30m"}])
def test_limits_do_not_shrink(tmp_path, asked):
    sweep = a_sweep(tmp_path, trials=6, budget="30k")
    with pytest.raises(ConfigError, match="give more to prolong it"):
        trials.prolong(sweep, SearchConfig(**asked), asked)


def test_a_trial_that_a_pruner_ended_has_the_score_at_which_it_was_judged(tmp_path):
    sweep = a_sweep(tmp_path, objective="success=1")
    sweep.run(0).folder.mkdir(parents=True)
    lines = [a_line(frames, 1.0) for frames in (1000, 2000)]
    sweep.run(0).metrics.write_text("".join(lines) + a_line(3000, 9.0).replace("0.5", "0.9"))
    result = SimpleNamespace(success_rate=0.9, stopped="pruned")
    with patch.object(trials, "read_result", lambda _: result):
        assert write_outcome(sweep, 0).score == 0.9  # by its user
        records.write(sweep.run(0).folder / trials.JUDGED, trials.CutRecord(frames=2500))
        found = write_outcome(sweep, 0)
    assert (found.score, found.frames, found.cut_at) == (0.5, 3000, 2500)
    cut = BegunTrial(a_trial(0, 2e-3).trial, found)
    whole = a_trial(1, 3e-3, 0.1)
    assert sorted([cut, whole], key=trials.rank)[0] is whole
    confirmed = next_trial(a_sweep(tmp_path, trials=2), [cut, whole], 2)
    assert confirmed.repeats is None
    begun = [cut, whole, BegunTrial(confirmed, whole.outcome)]
    assert next_trial(a_sweep(tmp_path, trials=2), begun, 3).repeats == 1
    assert sweep.observation(cut).cut_at == 2500


def test_a_bare_number_of_minutes_is_asked_back(tmp_path):
    with pytest.raises(ConfigError, match="--budget 20 is 20 frames; write 20m for minutes"):
        a_sweep(tmp_path, budget="20").search.check()


def test_what_confirming_costs_beside_a_budget_is_said(tmp_path):
    said = a_sweep(tmp_path, budget="30m").beside_budget
    assert "up to 12 trials of 10,000 frames beside it" in said
    assert a_sweep(tmp_path).beside_budget == ""
    assert a_sweep(tmp_path, budget="30m", confirm=0).beside_budget == ""
