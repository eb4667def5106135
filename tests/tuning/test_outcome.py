"""Whether a point is better than the default, and what becomes of it then."""

from __future__ import annotations

import dataclasses

import pytest

from flowrl.config import BottomUpConfig, GraphConfig
from flowrl.errors import BusyError, ConfigError
from flowrl.experts.merge import frame_count
from flowrl.experts.store import ExpertStore
from flowrl.parallel.health import DaemonLock
from flowrl.parallel.skill_sources import read_tuned, skill_configs
from flowrl.paths import GraphPaths
from flowrl.storage import records
from flowrl.tuning.outcome import (
    EVALUATION,
    SweepOutcome,
    TrialEvaluation,
    apply_winner,
    decide,
    forget,
    keep_winner,
    paired_interval,
)
from flowrl.tuning.sweep import create_sweep, prepare_trial
from flowrl.tuning.trials import Tried
from tests.parallel.making import GRAPH, LIBRARY, WOOD, finish
from tests.tuning.making import a_record, a_sweep, a_trial

DEFAULT = (0.50, 0.52, 0.48, 0.51)


def confirming(sweep, scores: dict[int | None, tuple[float, ...]]) -> list[Tried]:
    """Trials that reached these scores from the beginning on, as in fresh worlds."""
    tried = []
    for repeats, values in scores.items():
        for seed, score in enumerate(values):
            each = a_trial(len(tried), 2e-3, score, confirms=True, repeats=repeats)
            each = dataclasses.replace(each, trial=dataclasses.replace(each.trial, seed=seed))
            folder = sweep.run(len(tried)).folder
            folder.mkdir(parents=True)
            found = TrialEvaluation(episodes=1000, successes=round(1000 * score))
            records.write(folder / EVALUATION, found)
            tried.append(each)
    return tried


def test_a_point_that_is_better_with_every_seed_wins(tmp_path):
    sweep = a_sweep(tmp_path)
    better = tuple(score + 0.2 + 0.01 * k for k, score in enumerate(DEFAULT))
    found = decide(sweep, confirming(sweep, {None: DEFAULT, 7: better, 8: DEFAULT}))
    assert found.winner == 7
    (gain, none) = found.gains
    assert 0.1 < gain.low < gain.mean < gain.high
    assert none.mean == 0


def test_the_luckiest_of_points_without_effect_does_not_win(tmp_path):
    sweep = a_sweep(tmp_path)
    lucky = tuple(score + step for score, step in zip(DEFAULT, (0.3, -0.1, 0.2, 0), strict=True))
    found = decide(sweep, confirming(sweep, {None: DEFAULT, 7: lucky}))
    assert found.winner is None
    assert found.gains[0].mean > 0 > found.gains[0].low


def test_one_seed_confirms_nothing(tmp_path):
    sweep = a_sweep(tmp_path)
    assert decide(sweep, confirming(sweep, {None: (0.1,), 7: (0.9,)})).winner is None


def test_the_interval_is_that_of_student():
    mean, low, high = paired_interval([1.0, 2.0, 3.0, 4.0], share=0.95)
    half = 3.182446305284263 * 1.2909944487358056 / 2  # t with 3 degrees, deviation of the four
    assert (mean, low, high) == pytest.approx((2.5, 2.5 - half, 2.5 + half))


def config_of(graph: GraphPaths, **ppo):
    config = BottomUpConfig(graph=GraphConfig(graph_path=graph.root))
    origins = dict.fromkeys(ppo, "command line")
    ppo_of = dataclasses.replace(config.ppo, **ppo)
    config = dataclasses.replace(config, ppo=ppo_of, origins=origins)
    return skill_configs(config, LIBRARY)[WOOD]


def test_a_confirmed_point_becomes_the_settings_of_its_skill_alone(tmp_path):
    graph = GraphPaths(tmp_path / "graph")
    sweep = a_sweep(graph.sweeps / "s")
    better = tuple(score + 0.2 + 0.01 * k for k, score in enumerate(DEFAULT))
    found = decide(sweep, confirming(sweep, {None: DEFAULT, 7: better}))
    assert "trial 7 gains +0.2" in apply_winner(graph, sweep, found)
    tuned = config_of(graph)
    assert (tuned.ppo.lr, tuned.origins["lr"]) == (2e-3, "sweep")
    assert config_of(graph, lr=0.5).ppo.lr == 0.5
    assert read_tuned(graph, "Place Table") == {}
    assert "# flowrl sweep --name s: trial 7" in graph.tuned_file(WOOD).read_text()
    assert "has its defaults again" in forget(graph, WOOD)
    assert config_of(graph).ppo.lr == 1e-3
    assert "has no settings of a sweep" in forget(graph, WOOD)


def test_without_a_winner_nothing_is_written(tmp_path):
    graph = GraphPaths(tmp_path / "graph")
    none = SweepOutcome(seeds=3, default=0.5, gains=(), winner=None)
    assert "the defaults of Collect Wood stay" in apply_winner(graph, a_sweep(tmp_path), none)
    assert not graph.tuned.exists()


def test_settings_of_another_skill_are_refused(tmp_path):
    graph = GraphPaths(tmp_path / "graph")
    graph.tuned.mkdir(parents=True)
    graph.tuned_file(WOOD).write_text('["Place Table"]\nlr = 1.0\n')
    with pytest.raises(ConfigError, match="no single table 'Collect Wood'"):
        config_of(graph)


def test_the_winners_expert_is_merged_once(tmp_path):
    graph = GraphPaths(tmp_path / "graph")
    sweep = create_sweep(a_sweep(graph.sweeps / "s").paths, a_record(), graph, GRAPH)
    trial = a_trial(0, 2e-3, 0.9, confirms=True, repeats=7)
    prepare_trial(sweep, GRAPH, trial.trial)
    finish(sweep.run(0), {0: 50})
    won = SweepOutcome(seeds=3, default=0.5, gains=(), winner=7)
    lock = DaemonLock(graph.daemon_lock)
    lock.acquire()
    with pytest.raises(BusyError):
        keep_winner(graph, sweep, [trial], won, rule=frame_count)
    lock.release()
    for _ in range(2):
        said = keep_winner(graph, sweep, [trial], won, rule=frame_count)
        assert said == "expert 0 of Collect Wood is that of trial 0"
    manifest = ExpertStore(graph).manifest()
    assert len(manifest.merged) == 1
    assert manifest.experts[0].skill == WOOD
    assert graph.archive(0, WOOD).result_json.exists()
    assert sweep.run(0).result_json.exists()
