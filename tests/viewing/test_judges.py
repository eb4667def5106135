"""The reliability diagram of judges whose figures were measured."""

from __future__ import annotations

import numpy as np
import pytest

from flowrl.errors import ConfigError
from flowrl.judging.calibration import JudgeReport, measure
from flowrl.judging.judge import RuleJudge
from flowrl.paths import GraphPaths
from flowrl.storage import make_dir, records
from flowrl.viewing.judges import judges_picture


def test_each_bin_of_each_judge_is_drawn_and_in_the_table(tmp_path):
    graph_paths = GraphPaths(tmp_path)
    with pytest.raises(ConfigError, match=r"no judge was measured in .*; use flowrl judge"):
        judges_picture(graph_paths)
    rng = np.random.default_rng(0)
    scores = rng.random(200)
    labels = rng.random(200) < scores
    measured = measure(RuleJudge({}), "episode", (scores, labels), tuned=(scores, labels))
    make_dir(graph_paths.judging)
    report = JudgeReport(generation=1, calibration=measured, scores={})
    records.write(graph_paths.judging / "rule.json", report)
    picture = judges_picture(graph_paths)
    assert [row["items"] for row in picture.rows] == [20] * 10
    assert sum(row["items"] * row["positive"] for row in picture.rows) == labels.sum()
    for ending, mark in (
        (".svg", b"rule, episodes"),
        (".png", b"PNG"),
        (".html", b"<td>rule</td>"),
    ):
        assert mark in picture.written(ending)
