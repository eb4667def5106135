"""Whether a point is better than the default, and what becomes of it then."""

from __future__ import annotations

import dataclasses
import statistics

import pytest

from flowrl.config import BottomUpConfig, GraphConfig, PPOConfig
from flowrl.errors import BusyError, ComparingError, ConfigError
from flowrl.experts.store import ExpertStore
from flowrl.parallel.health import DaemonLock
from flowrl.parallel.recovery import state_fault
from flowrl.parallel.skill_sources import read_tuned, skill_configs
from flowrl.parallel.training_processor import merge_run
from flowrl.paths import GraphPaths, SweepPaths
from flowrl.reports.status import read_rows
from flowrl.runs import read_run
from flowrl.storage import records
from flowrl.tuning import outcome
from flowrl.tuning.outcome import Gain, SweepOutcome, apply_winner, decide, forget, keep_winner
from flowrl.tuning.sweep import create_sweep, prepare_trial
from flowrl.tuning.trials import BegunTrial, Sweep
from tests.parallel.making import GRAPH, LIBRARY, WOOD, finish, train
from tests.tuning.making import a_record, a_sweep, a_trial

DEFAULT = (0.50, 0.52, 0.48, 0.51)


def confirming(
    scores: dict[int | None, tuple[float, ...]],
) -> tuple[list[BegunTrial], dict[int, float]]:
    """Trials that reached these scores from the beginning on, and their success in fresh worlds."""
    tried: list[BegunTrial] = []
    for repeats, values in scores.items():
        for seed, score in enumerate(values):
            each = a_trial(len(tried), 2e-3, score, confirms=True, repeats=repeats)
            each = dataclasses.replace(each, trial=dataclasses.replace(each.trial, seed=seed))
            tried.append(each)
    return tried, {each.trial.number: each.score for each in tried}


def test_a_point_that_is_better_with_every_seed_wins(tmp_path):
    sweep = a_sweep(tmp_path)
    better = tuple(score + 0.2 + 0.01 * k for k, score in enumerate(DEFAULT))
    found = decide(sweep, *confirming({None: DEFAULT, 7: better, 8: DEFAULT}))
    assert (found.winner, found.best_expert) == (7, 7)  # of the trials 4 to 7 the last is the best
    (gain, none) = found.gains
    assert 0.1 < gain.low < gain.mean < gain.high
    assert none.mean == 0


def test_the_luckiest_of_points_without_effect_does_not_win(tmp_path):
    sweep = a_sweep(tmp_path)
    lucky = tuple(score + step for score, step in zip(DEFAULT, (0.3, -0.1, 0.2, 0), strict=True))
    found = decide(sweep, *confirming({None: DEFAULT, 7: lucky}))
    assert found.winner is None
    assert found.gains[0].mean > 0 > found.gains[0].low


def test_one_seed_confirms_nothing(tmp_path):
    sweep = a_sweep(tmp_path)
    found = decide(sweep, *confirming({None: (0.1,), 7: (0.9,)}))
    assert found.winner is None
    records.write(sweep.sweep_paths.outcome_json, found)


def test_a_seed_whose_default_failed_says_nothing(tmp_path):
    sweep = a_sweep(tmp_path)
    tried, success = confirming({None: (*DEFAULT, 0.5), 7: (*DEFAULT, 0.5)})
    del success[0]
    found = decide(sweep, tried, success)
    assert (found.seeds, found.winner) == (4, None)
    assert found.default == pytest.approx(statistics.fmean((*DEFAULT[1:], 0.5)), abs=1e-3)
    assert found.gains[0].mean == 0


def config_of(graph_paths: GraphPaths, **ppo):
    config = BottomUpConfig(graph=GraphConfig(graph_path=graph_paths.root))
    origins = dict.fromkeys(ppo, "command line")
    ppo_of = dataclasses.replace(config.ppo, **ppo)
    config = dataclasses.replace(config, ppo=ppo_of, origins=origins)
    return skill_configs(config, LIBRARY)[WOOD]


def test_a_confirmed_point_becomes_the_settings_of_its_skill_alone(tmp_path):
    graph_paths = GraphPaths(tmp_path / "graph")
    sweep = a_sweep(graph_paths.sweeps / "s")
    better = tuple(score + 0.2 + 0.01 * k for k, score in enumerate(DEFAULT))
    found = decide(sweep, *confirming({None: DEFAULT, 7: better}))
    assert "trial 7 gains +0.2" in apply_winner(graph_paths, sweep, found)
    tuned = config_of(graph_paths)
    assert (tuned.ppo.lr, tuned.origins["lr"]) == (2e-3, "sweep")
    assert config_of(graph_paths, lr=0.5).ppo.lr == 0.5
    assert read_tuned(graph_paths, "Place Table") == {}
    assert "# flowrl sweep --name s: trial 7" in graph_paths.tuned_file(WOOD).read_text()
    assert "has its defaults again" in forget(graph_paths, WOOD)
    assert config_of(graph_paths).ppo.lr == 1e-3
    assert "has no settings of a sweep" in forget(graph_paths, WOOD)


def test_a_repair_of_minibatches_is_among_the_settings(tmp_path):
    graph_paths = GraphPaths(tmp_path / "graph")
    steps = {"type": "int_uniform", "min": 17, "max": 99}
    envs = {"type": "int_uniform", "min": 10, "max": 100}
    sweep = a_sweep(graph_paths.sweeps / "s", space={"num_envs": envs, "num_steps": steps})
    gain = Gain(trial=7, point={"num_envs": 33, "num_steps": 65}, mean=0.2, low=0.1, high=0.3)
    apply_winner(graph_paths, sweep, SweepOutcome(seeds=3, default=0.5, gains=(gain,), winner=7))
    tuned = config_of(graph_paths).ppo
    assert (tuned.num_envs, tuned.num_steps) == (33, 65)
    assert tuned.num_minibatches != PPOConfig.num_minibatches
    assert 33 * 65 % tuned.num_minibatches == 0


def test_without_a_winner_nothing_is_written(tmp_path):
    graph_paths = GraphPaths(tmp_path / "graph")
    none = SweepOutcome(seeds=3, default=0.5, gains=(), winner=None)
    sweep = a_sweep(graph_paths.sweeps / "s")
    assert "the defaults of Collect Wood stay" in apply_winner(graph_paths, sweep, none)
    assert not graph_paths.tuned.exists()


@pytest.mark.parametrize(("own", "lr"), [(True, 1e-3), (False, 2e-3)])
def test_what_a_prolonged_sweep_no_longer_confirms_is_taken_back(tmp_path, own, lr):
    """Settings that another sweep has confirmed stay."""
    graph_paths = GraphPaths(tmp_path / "graph")
    sweep = a_sweep(graph_paths.sweeps / "s")
    gain = Gain(trial=7, point={"lr": 2e-3}, mean=0.2, low=0.1, high=0.3)
    won = SweepOutcome(seeds=3, default=0.5, gains=(gain,), winner=7)
    apply_winner(graph_paths, sweep if own else a_sweep(graph_paths.sweeps / "s2"), won)
    assert config_of(graph_paths).ppo.lr == 2e-3
    said = apply_winner(graph_paths, sweep, SweepOutcome(seeds=5, default=0.5, gains=(gain,)))
    kept = "defaults" if own else "settings by another sweep"
    assert said.endswith(f"the {kept} of Collect Wood stay")
    assert config_of(graph_paths).ppo.lr == lr


def test_settings_of_another_skill_are_refused(tmp_path):
    graph_paths = GraphPaths(tmp_path / "graph")
    graph_paths.tuned.mkdir(parents=True)
    graph_paths.tuned_file(WOOD).write_text('["Place Table"]\nlr = 1.0\n')
    with pytest.raises(ConfigError, match="no single table 'Collect Wood'"):
        config_of(graph_paths)


def won_sweep(graph_paths: GraphPaths):
    """A sweep whose one confirming trial has an expert, and its outcome."""
    sweep = Sweep(SweepPaths(graph_paths.sweeps / "s"), a_record())
    create_sweep(sweep, graph_paths, GRAPH)
    trial = a_trial(0, 2e-3, 0.9, confirms=True, repeats=7)
    prepare_trial(sweep, GRAPH, trial.trial)
    finish(sweep.run(0), {0: 50})
    return sweep, SweepOutcome(seeds=3, default=0.5, gains=(), winner=7, best_expert=0)


def test_the_winners_expert_is_merged_once(tmp_path):
    graph_paths = GraphPaths(tmp_path / "graph")
    sweep, won = won_sweep(graph_paths)
    lock = DaemonLock(graph_paths.daemon_lock)
    lock.acquire()
    with pytest.raises(BusyError):
        keep_winner(graph_paths, sweep, won, config=BottomUpConfig(), skills=GRAPH)
    lock.release()
    for _ in range(2):
        said = keep_winner(graph_paths, sweep, won, config=BottomUpConfig(), skills=GRAPH)
        assert said == "expert 0 of Collect Wood is that of trial 0"
    manifest = ExpertStore(graph_paths).manifest()
    assert len(manifest.merged) == 1
    assert manifest.experts[0].skill == WOOD
    (row,) = read_rows(graph_paths)
    assert (row.skill, row.status, row.expert) == (WOOD, "completed", 0)
    assert graph_paths.skill_file(WOOD).exists()
    assert not state_fault(graph_paths)
    assert graph_paths.archive(0, WOOD).result_json.exists()
    assert sweep.run(0).result_json.exists()


def test_a_trial_begins_as_a_copy_of_the_skill_that_its_own_is_like(tmp_path):
    graph_paths = GraphPaths(tmp_path / "graph")
    sweep, won = won_sweep(graph_paths)
    keep_winner(graph_paths, sweep, won, config=BottomUpConfig(), skills=GRAPH)
    sapling = dataclasses.replace(GRAPH.skills["Collect Sapling"], like=WOOD)
    graph = GRAPH.replacing(sapling)
    record = a_record(skill=sapling.name, expert=1)
    other = Sweep(SweepPaths(graph_paths.sweeps / "other"), record)
    create_sweep(other, graph_paths, graph)
    prepare_trial(other, graph, a_trial(0, 2e-3, 0.9).trial)
    copied = read_run(other.run(0)).copied
    assert copied == ExpertStore(graph_paths).manifest().experts[0]


def test_an_expert_whose_number_is_anothers_now_is_not_kept(tmp_path):
    graph_paths = GraphPaths(tmp_path / "graph")
    sweep, won = won_sweep(graph_paths)
    train(graph_paths, "Collect Drink", 0, {}, acted={0: 50})
    said = keep_winner(graph_paths, sweep, won, config=BottomUpConfig(), skills=GRAPH)
    assert "0 is not Collect Wood's" in said
    assert not graph_paths.run(0, WOOD).folder.exists()
    assert ExpertStore(graph_paths).manifest().experts[0].skill == "Collect Drink"


def test_the_rule_of_the_graph_decides_whether_the_winner_is_kept(tmp_path, monkeypatch):
    graph_paths = GraphPaths(tmp_path / "graph")
    sweep, won = won_sweep(graph_paths)
    graph_config = GraphConfig(merge_objective="success=1,deaths=0.5")
    config = BottomUpConfig(graph=graph_config, ppo=PPOConfig(frame_accounting="whole_run"))
    asked = []

    def merge(*_, **how):
        asked.append(how)
        if len(asked) == 1:
            raise ComparingError("being compared")
        return merge_run(*_, **how)

    monkeypatch.setattr(outcome, "merge_run", merge)
    monkeypatch.setattr(outcome, "_COMPARING_SECONDS", 0.0)
    keep_winner(graph_paths, sweep, won, config=config, skills=GRAPH)
    assert len(asked) == 2
    assert asked[0]["rule"].keywords == {"objective": "success=1,deaths=0.5"}
    assert asked[0]["accounting"] == "whole_run"
    assert ExpertStore(graph_paths).manifest().experts[0].skill == WOOD
