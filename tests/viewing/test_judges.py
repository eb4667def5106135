"""The reliability diagram of judges whose figures were measured."""

from __future__ import annotations

import pytest

from flowrl.errors import ConfigError
from flowrl.paths import GraphPaths
from flowrl.viewing.judges import judges_picture
from tests.serving.making import a_judge


def test_each_bin_of_each_judge_is_drawn_and_in_the_table(tmp_path):
    graph_paths = GraphPaths(tmp_path)
    with pytest.raises(ConfigError, match=r"no judge was measured in .*; use flowrl judge"):
        judges_picture(graph_paths)
    measured = a_judge(graph_paths).calibration
    (graph_paths.judging / "program.json").write_text("{}")  # what dspy has compiled
    picture = judges_picture(graph_paths)
    assert [row["items"] for row in picture.rows] == [20] * 10
    positive = sum(row["items"] * row["positive"] for row in picture.rows)
    assert positive == pytest.approx(200 * measured.positive)
    for ending, mark in (
        (".svg", b"rule, episodes"),
        (".png", b"PNG"),
        (".html", b"<td>rule</td>"),
    ):
        assert mark in picture.written(ending)
