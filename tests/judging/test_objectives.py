"""Measures mean the same for every run, objectives and objectives keep their limits."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from flowrl.errors import ConfigError, FileRefusedError
from flowrl.measures.objectives import (
    EPISODE_MEASURES,
    MEASURES,
    RUN_MEASURES,
    CurvePoint,
    parse_objective,
    progress,
    read_curve,
    run_figures,
)

LINE = {
    "frames": 100,
    "seconds": 1.5,
    "success_rate": 0.25,
    "mean_episode_length": 20.0,
    "mean_episode_return": 3.0,
    "loss": None,
}


def line(**figures):
    return json.dumps({**LINE, **figures}) + "\n"


@pytest.mark.parametrize("name", MEASURES)
def test_a_measure_scores_its_ends_and_what_lies_beyond(name):
    measure = MEASURES[name]
    assert measure.score(measure.worst) == 0
    assert measure.score(measure.best) == 1
    beyond = measure.worst + (measure.worst - measure.best)
    assert measure.score(math.copysign(math.inf, beyond)) == 0
    with pytest.raises(ConfigError, match=name):
        measure.score(math.nan)


def test_progress_is_the_area_under_the_curve():
    curve = [CurvePoint(50, 1.0, 0.5, 9.0), CurvePoint(100, 2.0, 1.0, 9.0)]
    assert progress(curve, budget_frames=100) == pytest.approx(0.125 + 0.375)
    assert progress(curve, budget_frames=200) == pytest.approx(0.25 + 0.5)
    assert progress(curve, budget_frames=75) == pytest.approx((12.5 + 15.625) / 75)
    assert progress([], budget_frames=100) == 0.0


def test_an_early_stop_is_worth_more_than_the_same_success_later():
    early = [CurvePoint(10, 1.0, 0.9, 9.0)]
    late = [CurvePoint(90, 1.0, 0.0, 9.0), CurvePoint(100, 1.0, 0.9, 9.0)]
    assert progress(early, budget_frames=100) > 0.8 > 0.1 > progress(late, budget_frames=100)


def test_progress_stays_within_its_range():
    random = np.random.default_rng(0)
    for _ in range(200):
        frames = np.cumsum(random.integers(1, 50, 20))
        curve = [CurvePoint(int(f), 1.0, float(random.random()), 9.0) for f in frames]
        assert 0 <= progress(curve, budget_frames=int(random.integers(1, 800))) <= 1


def test_a_run_measures_frames_to_its_goal():
    curve = [CurvePoint(400, 3.0, 0.5, 50.0, 2.0), CurvePoint(1000, 7.0, 0.9, 50.0, 4.0)]
    found = run_figures(curve, 0.9, budget_frames=1000, goal=0.8)
    assert (found["frames"], found["seconds"]) == (1000, 7.0)
    assert tuple(found) == RUN_MEASURES
    assert found["return"] == 4.0
    assert found["steps"] == pytest.approx(50 / 0.9)
    never = run_figures(curve[:1], 0.0, budget_frames=1000, goal=0.8)
    assert (never["frames"], never["seconds"], never["steps"]) == (math.inf, math.inf, math.inf)
    assert parse_objective("frames=1,steps=1").score(never) == 0


def test_an_objective_weighs_scores_and_keeps_limits():
    objective = parse_objective("success=3, deaths=1, success>=0.5, deaths<=0.3")
    assert objective.score({"success": 0.8, "deaths": 0.2}) == pytest.approx(0.8)
    assert objective.score({"success": 0.4, "deaths": 0.2}) == 0
    assert objective.broken({"success": 0.4, "deaths": 0.4}) == [
        "success is 0.4, not >= 0.5",
        "deaths is 0.4, not <= 0.3",
    ]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "measure=weight"),
        ("success", "measure=weight"),
        ("success=x", "measure=weight"),
        ("success=1e", "measure=weight"),
        ("success=-1", "0 or more"),
        ("success=1e999", "finite"),
        ("succes=1", "closest is 'success'"),
        ("satisfied>=1,success=1", "satisfied is not measured"),
        ("success>=0.5", "a weight above 0"),
        ("success=1,success>=80", r"success lies in \[0, 1\]; write 0.8 for 80 %"),
        ("success=1,deaths<=-0.1", r"deaths lies in \[0, 1\]"),
        ("quality=1,success=1", "quality is not measured"),
    ],
)
def test_a_bad_objective_is_refused(text, named):
    with pytest.raises(ConfigError, match=named) as caught:
        parse_objective(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("text", ["progress=0.5,success=1", "frames=1", "success=1,steps<=9"])
def test_only_what_single_episodes_measure_decides_a_merge(text):
    with pytest.raises(ConfigError, match="is not measured here; use success, return, deaths"):
        parse_objective(text, measured=EPISODE_MEASURES)


def test_a_figure_that_was_not_measured_is_named():
    with pytest.raises(ConfigError, match="needs deaths, and only success"):
        parse_objective("deaths=1").score({"success": 1.0})


def test_a_curve_is_read_from_metrics(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert read_curve(path) == ()
    again, torn = line(frames=90, success_rate=0.1), line(frames=300)[:-10]
    path.write_text(line() + again + line(frames=200, success_rate=None) + line(frames=250) + torn)
    assert [point.frames for point in read_curve(path)] == [100, 250]
    assert read_curve(path)[0] == CurvePoint(100, 1.5, 0.25, 20.0, 3.0)


@pytest.mark.parametrize(
    "bad",
    [
        "[]\n",
        "x\n",
        "\n",
        "[" * 100_000 + "\n",
        '{"frames": 1}\n',
        line(frames="1"),
        line(frames=True),
        line(frames=1.5),
        line(frames=-1),
        line(success_rate=1.5),
        line(seconds=math.nan),
        line(mean_episode_return=math.inf),
        line(mean_episode_length=-1),
        line(frames=math.inf),
        line(frames=10**400),
    ],
    ids=lambda text: text[:40],
)
def test_a_malformed_line_is_refused_by_its_number(tmp_path, bad):
    path = tmp_path / "metrics.jsonl"
    path.write_text(line() + bad)
    with pytest.raises(FileRefusedError, match=r"metrics.jsonl:2 "):
        read_curve(path)
